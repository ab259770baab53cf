"""Making a draft again from its lineage: same states commit, parent, policy and seed, then digests are compared.

Works over ports. The same digest is expected on the same machine with the same packages and number of threads; where
those differ, what differs is named. Knows nothing of commands or flows.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tide import repositories
from tide.config import Policy
from tide.domain import DraftModel, Erasure, Value
from tide.errors import BadInputError, Gone, NotFound
from tide.lineage import ledger
from tide.lineage.history_text import moment
from tide.models.candidates import POLICY_FILE
from tide.serving import rollout
from tide.states import snapshots
from tide.store.base import Store
from tide.trainer.base import ProgressCallback, Trainer, TrainingData, TrainingResult


class Reproduction(Value):
    """What came out when a draft was made again."""

    draft: str
    made: str
    """Digest of the checkpoint of the same step."""
    same: bool
    differences: tuple[str, ...]
    """What is not as it was when the draft was made, then what came out differently."""


def find(store: Store, repository: str, digest: str) -> str:
    """A ref that holds a draft: main for what was promoted, else its candidate's branch.

    Raises:
        NotFound: no ref has it.
    """
    prefix = rollout.draft_prefix(digest)
    for ref in (repositories.MAIN, *repositories.candidate_branches(store, repository)):
        if any(True for _ in store.list(repository, ref, prefix)):
            return ref
    raise NotFound(f"{repository}: no ref holds draft {digest[:12]}; `tide history` lists those that were promoted")


def reproduce(
    store: Store,
    repository: str,
    digest: str,
    *,
    trainer: Trainer,
    bundle: Path,
    scratch: Path,
    on_progress: ProgressCallback,
) -> Reproduction:
    """Train a draft again and compare.

    Args:
        repository: of the drafts.
        scratch: folder for downloads and the run; what is made in it is removed.

    Raises:
        NotFound: the draft, its states commit or its parent is not in this store.
        Gone: its states commit lost rows; names the erasure.
        BadInputError: it was not trained here, or its policy was not kept.
    """
    ref = find(store, repository, digest)
    record = rollout.read_draft(store, repository, ref, digest)
    policy = _policy(store, repository, ref, record)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reproduce-", dir=scratch) as folder:
        result = _train(store, repository, record, policy, trainer, bundle, Path(folder), on_progress)
    made = {checkpoint.step: checkpoint.digest for checkpoint in result.checkpoints}
    found = made.get(record.steps, "")
    return Reproduction(
        draft=digest, made=found, same=found == digest, differences=tuple(_differences(record, result, found))
    )


def _policy(store: Store, repository: str, ref: str, record: DraftModel) -> Policy:
    name = record.digest[:12]
    if record.states_repository is None or record.states_commit is None:
        raise BadInputError(f"draft {name} was imported: there is nothing to make it again from")
    try:
        kept = store.read(repository, ref, f"{rollout.draft_prefix(record.digest)}{POLICY_FILE}")
    except NotFound as error:
        raise BadInputError(f"draft {name}: the policy it was trained by was not kept with it") from error
    # Of the bytes as they were written: a policy has got fields since.
    if hashlib.sha256(kept).hexdigest() != record.policy:
        raise BadInputError(f"draft {name}: {POLICY_FILE} beside it is not the policy that its record names")
    return Policy.model_validate_json(kept)


def _train(
    store: Store,
    repository: str,
    record: DraftModel,
    policy: Policy,
    trainer: Trainer,
    bundle: Path,
    folder: Path,
    on_progress: ProgressCallback,
) -> TrainingResult:
    assert record.states_repository is not None
    assert record.states_commit is not None
    try:
        shards = snapshots.fetch_training(
            store,
            record.states_repository,
            record.states_commit,
            folder / "shards",
            train_tokens=policy.train_tokens,
            replay_fraction=policy.replay_fraction,
        )
    except Gone as error:
        raise Gone(
            f"draft {record.digest[:12]} cannot be made again: {why_gone(store, repository, record.states_commit)}; "
            f"its weights stay as they are ({error})"
        ) from error
    parent = None
    if record.parent is not None:
        holder = find(store, repository, record.parent)
        parent = rollout.install_draft(store, repository, holder, record.parent, folder / "parent")
    return trainer.train(
        TrainingData(shards=shards, target=record.target),
        policy.train,
        parent=parent,
        bundle=bundle,
        workdir=folder / "run",
        on_progress=on_progress,
    )


def why_gone(store: Store, repository: str, commit: str) -> str:
    """Why a states commit misses rows, as far as the ledger of a drafts repository knows."""
    lost = f"states commit {commit[:12]} lost rows"
    found = [r for r in ledger.every(store, repository, ledger.ERASURE, Erasure) if commit in r.commits]
    if not found:
        return f"{lost}, and no erasure on the ledger names it: its bytes were deleted past TIDE"
    return f"{lost} by " + " and ".join(f"erasure {r.id} of {moment(r.at)}" for r in found)


def _differences(record: DraftModel, result: TrainingResult, made: str) -> Iterator[str]:
    yield from _unlike(record.environment, result.environment)
    if record.trained_tokens != result.tokens:
        yield f"training tokens: {record.trained_tokens} then, {result.tokens} now"
    if record.trained_requests != result.samples:
        yield f"training requests: {record.trained_requests} then, {result.samples} now"
    if not made:
        yield f"no checkpoint at step {record.steps}: {sorted(c.step for c in result.checkpoints)}"
    elif made != record.digest:
        yield f"weights: {record.digest[:12]} then, {made[:12]} now"


def _unlike(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield f"{name}: {then.get(name, 'unknown')} then, {now.get(name, 'unknown')} now"
