"""The pipeline of `dvc.yaml`: fetch, split, train, evaluate, report, on a pinned states commit.

    python -m tide.experiment fetch|split|train|evaluate|report

Owns where an experiment's files lie. The work is that of the flows, by the same functions;
nothing is written to the store and nothing is promoted. Settings come from TIDE_* (`eval "$(tide env)"`), what is
decided by from params.yaml.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tide import wiring
from tide.acceptance import baseline_without_draft
from tide.config import Policy
from tide.domain import EvalReport, Split, TrainingProgress, split_of
from tide.errors import BadInputError, Gone, NotFound, TideError
from tide.files import held, whole_folder, write_durably
from tide.pinned import LOCK, Pinned
from tide.promotion import rule as promotion
from tide.promotion import verdict_text
from tide.serving import rollout
from tide.states import snapshots
from tide.states.shards import read_manifest
from tide.store.base import Store
from tide.trainer import checkpoints
from tide.trainer.base import TrainingData

PARAMS = Path("params.yaml")
ROOT = Path("build/experiment")
SHARDS, PARENT, DRAFT = ROOT / "shards", ROOT / "parent", ROOT / "draft"
SPLIT, TRAINING = ROOT / "split.json", ROOT / "training.json"
METRICS, SLICES, REPORT = ROOT / "metrics.json", ROOT / "slices.csv", ROOT / "report.md"
REPORTS = ROOT / "reports"
LOCK_FILE = ROOT / "stage.lock"


def fetch() -> None:
    """Shards of the pinned commit, by split, and the parent draft.

    Raises:
        BadInputError: the commit holds other data than was pinned.
        Gone: the commit lost rows.
        NotFound: the store has no such commit.
    """
    pinned, policy = Pinned.load(), Policy.load(PARAMS)
    store = wiring.store(wiring.settings())
    where = (store, pinned.repository, pinned.commit)
    try:
        found = snapshots.content_digest(*where)
    except NotFound as error:
        raise NotFound(
            f"{LOCK} pins a commit that this store does not have: {error}; pin another with `tide snapshot pin REF`"
        ) from error
    except Gone as error:
        raise Gone(
            f"{LOCK} pins a commit that lost rows, by an erasure or past TIDE: {error}; "
            "pin another with `tide snapshot pin REF`"
        ) from error
    if found != pinned.digest:
        raise BadInputError(
            f"{pinned.repository}@{pinned.commit[:12]} holds {found[:12]}, {LOCK} says {pinned.digest[:12]}: "
            "pin it again with `tide snapshot pin`"
        )
    with whole_folder(SHARDS) as folder:
        snapshots.fetch_training(
            *where, folder / "train", train_tokens=policy.train_tokens, replay_fraction=policy.replay_fraction
        )
        for split, requests in ((Split.SELECTION, policy.selection_requests), (Split.GATE, policy.gate_requests)):
            snapshots.fetch_held_out(*where, folder / split.value, split=split, requests=requests)
    with whole_folder(PARENT) as folder:
        if pinned.parent:
            _fetch_parent(store, pinned.drafts_repository, pinned.parent, folder)


def _fetch_parent(store: Store, repository: str, digest: str, folder: Path) -> None:
    try:
        rollout.install_draft(store, repository, "main", digest, folder)
    except NotFound as error:
        raise NotFound(
            f"{LOCK} pins a parent draft that this store does not have: {error}; pin again with `tide snapshot pin REF`"
        ) from error


def split() -> None:
    """Count each split's requests, and prove that no conversation stands in two.

    Raises:
        BadInputError: a conversation leaks, or a split that training or the gate needs is empty.
    """
    members = {s: _conversations(s, _shards(s.value)) for s in Split}
    for one in Split:
        for other in Split:
            if one < other and (shared := members[one].keys() & members[other].keys()):
                raise BadInputError(f"conversation {min(shared)} stands in {one.value} and in {other.value}")
    if empty := [s.value for s in (Split.TRAIN, Split.GATE) if not members[s]]:
        raise BadInputError(
            f"the pinned commit has no requests of {', '.join(empty)}: serve more traffic, harvest it, pin again"
        )
    counts = {s.value: {"conversations": len(m), "requests": sum(m.values())} for s, m in members.items()}
    _write(SPLIT, counts)


def train() -> None:
    """Train from the pinned parent; the checkpoint with the best walk on the selection split is kept."""
    policy, config = Policy.load(PARAMS), wiring.settings()
    shards = _shards("train")
    with whole_folder(ROOT / "run") as workdir:
        result = wiring.trainer().train(
            TrainingData(shards=tuple(shards), target=read_manifest(shards[0]).target),
            policy.train,
            parent=_parent(),
            bundle=config.bundle,
            workdir=workdir.resolve(),
            on_progress=_say_progress,
        )
        chosen, choice = checkpoints.best(result.checkpoints, lambda draft: _walk(draft, Split.SELECTION), print)
        with whole_folder(DRAFT) as folder:
            shutil.copytree(chosen.draft, folder / chosen.digest)
    shutil.rmtree(ROOT / "run", ignore_errors=True)
    facts = {"digest": chosen.digest, "step": chosen.step, "loss": result.final_loss, "samples": result.samples}
    facts |= {"tokens": result.tokens, "coverage": result.coverage}
    _write(TRAINING, {**facts, "selection_acceptance_length": choice.acceptance_length, "chosen": choice.reason})


def evaluate() -> None:
    """Walk the draft and its parent over the same gate requests."""
    candidate, parent = _walk(_draft(), Split.GATE), _parent()
    assert candidate is not None  # split() has seen gate requests
    incumbent = _walk(parent, Split.GATE) if parent else baseline_without_draft(candidate)
    assert incumbent is not None
    with whole_folder(REPORTS) as folder:
        for name, report in (("candidate", candidate), ("incumbent", incumbent)):
            write_durably(folder / f"{name}.json", report.to_json().encode())


def report() -> None:
    """The gate's verdict as it would be, metrics, and acceptance by slice."""
    policy, pinned = Policy.load(PARAMS), Pinned.load()
    candidate, incumbent = (
        EvalReport.model_validate_json((REPORTS / f"{name}.json").read_bytes()) for name in ("candidate", "incumbent")
    )
    verdict = promotion.decide(
        candidate,
        incumbent,
        policy.promotion,
        attempt=1,
        states_commit=pinned.commit,
        policy_digest=policy.digest(),
    )
    _write(
        METRICS,
        {
            "acceptance_length": verdict.overall.candidate,
            "incumbent_acceptance_length": verdict.overall.incumbent,
            "difference_low": verdict.overall.difference.low,
            "requests": verdict.overall.requests,
            "outcome": verdict.outcome,
        },
    )
    write_durably(REPORT, verdict_text.to_markdown(verdict).encode())
    with SLICES.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["slice", "requests", "candidate", "incumbent"])
        rows.writerows([s.slice, s.requests, s.candidate, s.incumbent] for s in (verdict.overall, *verdict.slices))


def _shards(folder: str) -> list[Path]:
    return sorted((SHARDS / folder).glob("*.safetensors"), key=lambda f: (read_manifest(f).closed_at, f.name))


def _conversations(split: Split, shards: Iterable[Path]) -> dict[str, int]:
    """Requests of each conversation of a split: held-out shards hold gate and selection ones together."""
    found: dict[str, int] = {}
    for shard in shards:
        for request in read_manifest(shard).requests:
            if split is Split.TRAIN or split_of(request.conversation) is split:
                found[request.conversation] = found.get(request.conversation, 0) + 1
    return found


def _parent() -> Path | None:
    return next(iter(sorted(PARENT.iterdir())), None)


def _draft() -> Path:
    return next(iter(sorted(DRAFT.iterdir())))


def _walk(draft: Path, split: Split) -> EvalReport | None:
    shards = _shards(split.value)
    if not shards:
        return None
    policy, bundle = Policy.load(PARAMS), wiring.settings().bundle
    return wiring.evaluator().evaluate(draft, shards, bundle=bundle, split=split, steps=policy.draft_steps)


def _say_progress(progress: TrainingProgress) -> None:
    loss = "-" if progress.loss is None else f"{progress.loss:.3f}"
    print(f"step {progress.step}/{progress.total_steps} loss {loss}", flush=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, (json.dumps(content, indent=2) + "\n").encode())


STAGES: dict[str, Callable[[], None]] = {
    "fetch": fetch,
    "split": split,
    "train": train,
    "evaluate": evaluate,
    "report": report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage; a TIDE error is one line and exit 1.

    Stages of one checkout share its files: they wait for each other.
    """
    parser = argparse.ArgumentParser(prog="python -m tide.experiment", description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=STAGES)
    stage = STAGES[parser.parse_args(arguments).stage]
    try:
        with held(LOCK_FILE, lambda by: print(f"waiting for process {by}, which runs a stage here", flush=True)):
            stage()
    except TideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
