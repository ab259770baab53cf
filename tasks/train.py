"""Train: a candidate from a snapshot, the checkpoint chosen by a walk, published on a branch of its own."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Sequence
from logging import INFO, WARNING
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment

from tasks.events import announce
from tasks.runs import attempt_key
from tasks.serve import drafting
from tasks.stage import cache_folder, stage
from tasks.version import fetch_held_out_shards, pin_snapshot
from tide import wiring
from tide.domain import CheckpointChoice, DraftModel, DriftReport, EvalReport, Snapshot, Split, TrainingProgress
from tide.errors import Gone, NotFound, TrainingError
from tide.files import whole_folder
from tide.lineage import ledger
from tide.models import candidates
from tide.models.draft_files import load_draft
from tide.promotion.comparable import check_reproduced
from tide.serving import rollout
from tide.trainer import checkpoints
from tide.trainer.base import Checkpoint, Preflight, ProgressCallback, TrainingData, TrainingResult
from tide.watching import events

_POLL_S = 1.0
"""Prefect's own 5 s would be most of what a cycle loses after a short training."""


@stage("request training")
def request_training(snapshot: Snapshot, drift: DriftReport) -> str:
    """Run the ``train`` deployment on its own work pool and wait for it, unless its candidate is there already.

    A cycle that was killed here finds, when it runs again, the candidate or the run that is on its way to it: the
    branch is named by what is trained from, and the run by the branch and the attempt.

    Returns:
        The branch of the drafts repository that holds the candidate.

    Raises:
        TrainingError: the run did not complete; names the run and its state.
    """
    branch = training_branch(snapshot)
    if trained_before(branch):
        return branch
    parameters = {"branch": branch, "states_ref": snapshot.commit, "drift": drift.model_dump(mode="json")}
    run = run_deployment(
        "train/train", parameters=parameters, idempotency_key=attempt_key(branch), poll_interval=_POLL_S
    )
    assert isinstance(run, FlowRun)  # Prefect types the call for async callers as well
    if run.state is None or not run.state.is_completed():
        raise TrainingError(f"flow run {run.name} ({run.id}) ended {run.state}: see its log in the Prefect UI")
    return branch


def training_branch(snapshot: Snapshot) -> str:
    """Branch of the candidate that is trained from what serves now on a snapshot."""
    config = wiring.settings()
    stable = rollout.read_serving(wiring.store(config), config.drafts_repository).stable
    return candidates.branch_of(snapshot.commit, stable.digest if stable else None, config.policy())


def trained_before(branch: str) -> DraftModel | None:
    """The candidate that a branch holds already; it is not trained again."""
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    digest = candidates.published(store, drafts, branch)
    if digest is None:
        return None
    get_run_logger().info("%s holds candidate %s already: not trained again", branch, digest[:12])
    return rollout.read_draft(store, drafts, branch, digest)


@stage("look for a candidate")
def find_candidate(branch: str) -> DraftModel | None:
    """What a training run of before has published on its branch; None when there is something to train."""
    return trained_before(branch)


@stage("fetch parent draft")
def fetch_parent() -> Path | None:
    """Local folder of the draft in serving, or None when there is none yet."""
    config = wiring.settings()
    store = wiring.store(config)
    stable = rollout.read_serving(store, config.drafts_repository).stable
    if stable is None:
        return None
    return rollout.install_draft(store, config.drafts_repository, "main", stable.digest, cache_folder("drafts"))


@stage("verify parent")
def verify_parent(parent: Path | None) -> None:
    """Refuse a parent that no longer accepts what its record says, on the requests it was recorded on."""
    record = load_draft(parent).record if parent else None
    if parent is None or record is None or record.selection_acceptance_length is None or not record.states_commit:
        get_run_logger().info("no recorded acceptance to hold the parent against")
        return
    config = wiring.settings()
    try:
        report = walk_selection(parent, pin_snapshot.fn(record.states_commit))
    except (NotFound, Gone) as error:
        lost = "lost rows by an erasure" if isinstance(error, Gone) else "are not in this store"
        get_run_logger().warning("the parent's states %s %s: not verified", record.states_commit[:12], lost)
        return
    if report is not None:
        check_reproduced(record.selection_acceptance_length, report.acceptance_length, config.policy().parent_tolerance)
        get_run_logger().info("parent reproduces its acceptance length %.3f", report.acceptance_length)


@stage("preflight")
def preflight(snapshot: Snapshot, parent: Path | None) -> Preflight:
    """Look at this worker before any states are loaded.

    Raises:
        TrainingError: it cannot do the run; names what is wrong, and how to mend it.
    """
    config, logger = wiring.settings(), get_run_logger()
    policy = config.policy()
    found = wiring.trainer().preflight(
        policy.train,
        target=snapshot.target,
        tokens=min(snapshot.rows, policy.train_tokens),
        parent=parent,
        bundle=config.bundle,
        workdir=runs_folder(),
    )
    for finding in found.findings:
        logger.log(INFO if finding.state == "ok" else WARNING, "%s: %s. %s", finding.name, finding.detail, finding.fix)
    found.check()
    return found


def runs_folder() -> Path:
    """Where each training run has a folder of its own."""
    return wiring.settings().home / "train"


@stage("train draft")
def train_draft(snapshot: Snapshot, shards: Sequence[Path], parent: Path | None) -> TrainingResult:
    """Train with SpecForge; progress goes to the log and to a progress artifact. The folder is this run's own."""
    config = wiring.settings()
    workdir = runs_folder() / uuid.uuid4().hex[:12]
    workdir.mkdir(parents=True)
    return wiring.trainer().train(
        TrainingData(shards=tuple(shards), target=snapshot.target),
        config.policy().train,
        parent=parent,
        bundle=config.bundle,
        workdir=workdir,
        on_progress=_progress_to_prefect(),
    )


def _progress_to_prefect() -> ProgressCallback:
    logger = get_run_logger()
    artifact = create_progress_artifact(progress=0.0, key="training-progress", description="steps done, percent")
    assert isinstance(artifact, uuid.UUID)  # Prefect types the call for async callers as well

    def report(progress: TrainingProgress) -> None:
        loss = "-" if progress.loss is None else f"{progress.loss:.3f}"
        eta = "-" if progress.eta_s is None else f"{progress.eta_s:.0f} s"
        logger.info("step %d/%d loss %s, %s to go", progress.step, progress.total_steps, loss, eta)
        percent = 100.0 * progress.step / max(1, progress.total_steps)
        update_progress_artifact(artifact_id=artifact, progress=min(100.0, percent))

    return report


@stage("select checkpoint")
def select_checkpoint(result: TrainingResult, snapshot: Snapshot) -> tuple[Checkpoint, CheckpointChoice]:
    """The checkpoint with the best walk on the selection split; the ledger gets all of them, and why this one."""
    config = wiring.settings()
    chosen, choice = checkpoints.best(
        result.checkpoints,
        lambda draft: walk_selection(draft, snapshot),
        get_run_logger().info,
        final_loss=result.final_loss,
        states_commit=snapshot.commit,
    )
    ledger.append(wiring.store(config), config.drafts_repository, "checkpoint", choice)
    return chosen, choice


def walk_selection(draft: Path, snapshot: Snapshot) -> EvalReport | None:
    """Walk a draft over the newest selection requests of a snapshot; None when there are none."""
    config = wiring.settings()
    shards = fetch_held_out_shards.fn(snapshot, Split.SELECTION, config.policy().selection_requests)
    if not shards:
        return None
    return wiring.evaluator().evaluate(draft, shards, bundle=config.bundle, split=Split.SELECTION, **drafting())


@stage("publish candidate")
def publish_candidate(
    branch: str,
    chosen: tuple[Checkpoint, CheckpointChoice],
    result: TrainingResult,
    snapshot: Snapshot,
    parent: Path | None,
    drift: DriftReport | None,
) -> DraftModel:
    """Put the candidate on a branch of the drafts repository: weights, configuration, record, lineage."""
    config = wiring.settings()
    policy, store, checkpoint = config.policy(), wiring.store(config), chosen[0]
    files = load_draft(checkpoint.draft, expected=checkpoint.digest)
    draft = DraftModel(
        digest=checkpoint.digest,
        contract=files.contract,
        target=snapshot.target,
        parent=parent.name if parent else None,
        states_repository=snapshot.repository,
        states_commit=snapshot.commit,
        trained_tokens=result.tokens,
        trained_requests=result.samples,
        steps=checkpoint.step,
        max_length=policy.train.max_length,
        selection_acceptance_length=chosen[1].acceptance_length,
        policy=policy.digest(),
        seed=policy.train.seed,
        environment=result.environment,
        created_at=time.time(),
    )
    candidates.publish(store, config.drafts_repository, branch, checkpoint.draft, draft, drift, policy)
    _tidy(checkpoint, draft.digest)
    announce(events.DRAFT_TRAINED, events.of_draft(draft.digest), branch=branch, states_commit=snapshot.commit)
    return draft


def _tidy(checkpoint: Checkpoint, digest: str) -> None:
    """Keep the candidate in the local cache for its evaluation; the run's scratch folder goes."""
    kept = cache_folder("drafts") / digest
    if not kept.exists():  # else an equal candidate has put it there, perhaps at this moment
        with whole_folder(kept, replace=False) as folder:
            shutil.copytree(checkpoint.draft, folder, dirs_exist_ok=True)
    runs = runs_folder().absolute()
    for folder in checkpoint.draft.absolute().parents:
        if folder.parent == runs:
            shutil.rmtree(folder, ignore_errors=True)
