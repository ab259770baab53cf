"""A promoted draft is made again from its lineage alone, to the byte, by the real trainer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.support.tiny import request_info
from tests.support.tiny_target import tiny_target, tiny_target_states
from tide.config import Policy
from tide.domain import DraftModel, Split, TrainingConfig, TrainingProgress
from tide.errors import BadInputError, NotFound
from tide.models import candidates
from tide.models.draft_files import load_draft
from tide.models.target_files import bundle_contract
from tide.reproduce import Reproduction, reproduce
from tide.serving.rollout import draft_prefix
from tide.states.shards import write_shard
from tide.trainer.base import ProgressCallback, TrainingData
from tide.trainer.hardware import Hardware
from tide.trainer.specforge import SpecForgeTrainer

STATES, DRAFTS, BRANCH = "svc-states", "svc-drafts", "candidate-20260101T000000Z"
POLICY = Policy(
    train=TrainingConfig(
        epochs=4, max_steps=6, batch_size=4, ttt_length=2, checkpoints=2, draft_vocab_size=256, prompt_rows=4
    )
)


@dataclass
class Made:
    """A store with one candidate, trained from one window."""

    root: Path
    store: MemoryStore
    bundle: Path
    trainer: SpecForgeTrainer
    draft: DraftModel

    def again(self, digest: str | None = None, on_progress: ProgressCallback = lambda _: None) -> Reproduction:
        return reproduce(
            self.store,
            DRAFTS,
            digest or self.draft.digest,
            trainer=self.trainer,
            bundle=self.bundle,
            scratch=self.root / "scratch",
            on_progress=on_progress,
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("reproduce")
    trainer, store = SpecForgeTrainer(hardware=Hardware("cpu")), MemoryStore()
    model = tiny_target(root / "target")
    bundle = trainer.prepare_bundle(model, root / "bundle")
    target = bundle_contract(bundle)
    states = [replace(s, info=request_info(f"r{i}", Split.TRAIN)) for i, s in enumerate(tiny_target_states(model, 12))]
    shard = write_shard(root / "shards", states, split=Split.TRAIN, target=target, opened_at=1.0, closed_at=2.0)
    store.create_repository(STATES)
    for name in (shard.file, f"{shard.name}.json"):
        store.put(STATES, "main", f"windows/20260101T000000Z/r0/train/{name}", root / "shards" / name)
    commit = store.commit(STATES, "main", "harvest", {}).id
    result = trainer.train(
        TrainingData(shards=(root / "shards" / shard.file,), target=target),
        POLICY.train,
        parent=None,
        bundle=bundle,
        workdir=root / "first",
        on_progress=lambda _: None,
    )
    chosen = result.checkpoints[-1]
    draft = DraftModel(
        digest=chosen.digest,
        contract=load_draft(chosen.draft).contract,
        target=target,
        states_repository=STATES,
        states_commit=commit,
        trained_tokens=result.tokens,
        trained_requests=result.samples,
        steps=chosen.step,
        policy=POLICY.digest(),
        seed=POLICY.train.seed,
        environment=result.environment,
        created_at=time.time(),
    )
    candidates.publish(store, DRAFTS, BRANCH, chosen.draft, draft, None, POLICY)
    return Made(root, store, bundle, trainer, draft)


def test_the_same_lineage_gives_the_same_weights(made: Made) -> None:
    found = made.again()
    assert (found.same, found.made, found.differences) == (True, made.draft.digest, ())
    assert list((made.root / "scratch").iterdir()) == [], "nothing is left behind"


def test_two_reproductions_at_once_do_not_meet(made: Made) -> None:
    """Each has its own folder, caches and rendezvous; what one leaves or removes, the other never had."""
    together = threading.Barrier(2, timeout=300)
    seen: list[list[str]] = []

    def wait_for_the_other(progress: TrainingProgress) -> None:
        if progress.step == 1:
            seen.append([folder.name for folder in (made.root / "scratch").iterdir()])
            together.wait()

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(made.again, on_progress=wait_for_the_other) for _ in range(2)]
        found = [run.result() for run in runs]
    assert [len(names) for names in seen] == [2, 2], "they did not run at the same time, so that this shows nothing"
    assert [(f.same, f.differences) for f in found] == [(True, ())] * 2
    assert list((made.root / "scratch").iterdir()) == []


def test_what_differs_is_named_and_the_rest_is_not(made: Made) -> None:
    """The record is changed, not the run: made with another torch, from one token more."""
    store, record = made.store, made.draft
    other = record.model_copy(
        update={"environment": {**record.environment, "torch": "1.0"}, "trained_tokens": record.trained_tokens + 1}
    )
    store.put(DRAFTS, BRANCH, f"{draft_prefix(record.digest)}draft.json", other.to_json().encode())
    store.commit(DRAFTS, BRANCH, "another record", {})
    found = made.again()
    assert found.same
    assert [d.partition(":")[0] for d in found.differences] == ["torch", "training tokens"]
    store.put(DRAFTS, BRANCH, f"{draft_prefix(record.digest)}draft.json", record.to_json().encode())
    store.commit(DRAFTS, BRANCH, "as it was", {})


def test_a_draft_whose_policy_was_not_kept_or_is_another_is_refused(made: Made) -> None:
    path = f"{draft_prefix(made.draft.digest)}{candidates.POLICY_FILE}"
    made.store.put(DRAFTS, BRANCH, path, Policy().to_json().encode())
    made.store.commit(DRAFTS, BRANCH, "another policy", {})
    with pytest.raises(BadInputError, match="beside it is not the policy"):
        made.again()
    made.store.delete(DRAFTS, BRANCH, path)
    made.store.commit(DRAFTS, BRANCH, "no policy", {})
    with pytest.raises(BadInputError, match="was not kept"):
        made.again()
    made.store.put(DRAFTS, BRANCH, path, POLICY.to_json().encode())
    made.store.commit(DRAFTS, BRANCH, "as it was", {})


def test_a_draft_that_no_ref_holds_is_not_found(made: Made) -> None:
    with pytest.raises(NotFound, match="tide history"):
        made.again("f" * 64)
