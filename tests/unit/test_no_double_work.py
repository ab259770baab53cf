"""Nothing is done twice: a candidate by its inputs, a branch by its one candidate, a cycle by its window key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import train
from tests.fakes.memory_store import MemoryStore
from tests.support.drafts import draft_config, draft_tensors
from tests.support.reports import TARGET
from tide import cycles, repositories, wiring
from tide.config import Policy, Settings
from tide.cycles import Cycle
from tide.domain import DraftModel, DriftReport, Snapshot, TargetContract, TrainingConfig
from tide.errors import Conflict, NothingToCommit
from tide.lineage import ledger
from tide.models import candidates
from tide.models.draft_files import load_draft, write_draft
from tide.store.base import Commit

DRAFTS, BRANCH = "svc-drafts", "candidate-1"
OURS = TargetContract(
    weights="a" * 64, tokenizer="b" * 64, dtype="bfloat16", hidden_size=16, vocab_size=50, aux_layers=(1, 2, 3)
)
REPORT = DriftReport(
    decision="retrain", cause="drift", reasons=("moved",), figures={}, incumbent="d", states_commit="s"
)
SNAPSHOT = Snapshot(
    repository="svc-states", commit="5" * 64, target=TARGET, windows=(), shards=1, requests=1, rows=1, drafts=()
)


def draft(folder: Path, seed: int) -> tuple[Path, DraftModel]:
    path, digest = write_draft(folder, draft_config(), draft_tensors(draft_config(), seed))
    return path, DraftModel(digest=digest, contract=load_draft(path).contract, target=OURS, states_commit="5" * 64)


def publish(store: MemoryStore, found: tuple[Path, DraftModel]) -> None:
    candidates.publish(store, DRAFTS, BRANCH, *found, None, Policy())


def test_a_branch_is_named_by_what_is_trained_from_and_by_nothing_else() -> None:
    name = candidates.branch_of("5" * 64, "a" * 64, Policy())
    assert name == candidates.branch_of("5" * 64, "a" * 64, Policy())
    assert name.startswith(f"{repositories.CANDIDATE}55555555-")
    others = [
        candidates.branch_of("6" * 64, "a" * 64, Policy()),
        candidates.branch_of("5" * 64, "b" * 64, Policy()),
        candidates.branch_of("5" * 64, None, Policy()),
        candidates.branch_of("5" * 64, "a" * 64, Policy(train=TrainingConfig(seed=1))),
    ]
    assert len({name, *others}) == 5


def test_publishing_the_same_candidate_again_makes_no_second_commit(tmp_path: Path) -> None:
    store, made = MemoryStore(), draft(tmp_path, 1)
    assert candidates.published(store, DRAFTS, BRANCH) is None
    publish(store, made)
    head = store.head(DRAFTS, BRANCH)
    publish(store, made)
    assert store.head(DRAFTS, BRANCH) == head
    assert candidates.published(store, DRAFTS, BRANCH) == made[1].digest


def test_a_branch_never_gets_a_second_candidate(tmp_path: Path) -> None:
    store, made = MemoryStore(), draft(tmp_path, 1)
    publish(store, made)
    with pytest.raises(Conflict, match=f"holds candidate {made[1].digest[:12]} already"):
        publish(store, draft(tmp_path, 2))
    assert candidates.published(store, DRAFTS, BRANCH) == made[1].digest


def test_what_a_killed_publication_had_staged_is_no_part_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first, second = MemoryStore(), draft(tmp_path, 1), draft(tmp_path, 2)

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        repositories.ensure_drafts(store, DRAFTS)
        patch.setattr(store, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            publish(store, first)
    assert candidates.published(store, DRAFTS, BRANCH) is None
    publish(store, second)
    drafts = {o.path.split("/")[1] for o in store.list(DRAFTS, BRANCH, "drafts/")}
    assert drafts == {second[1].digest}


@pytest.fixture
def wired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store, config = MemoryStore(), Settings(service="svc", home=tmp_path, _env_file=None)
    repositories.ensure_drafts(store, DRAFTS)
    monkeypatch.setattr(wiring, "settings", lambda: config)
    monkeypatch.setattr(wiring, "store", lambda _: store)
    monkeypatch.setattr(train, "get_run_logger", lambda: SimpleNamespace(info=lambda *_: None))
    return store


def test_a_cycle_whose_candidate_is_there_already_starts_no_training(
    wired: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = draft(tmp_path, 1)
    branch = train.training_branch(SNAPSHOT)
    candidates.publish(wired, DRAFTS, branch, *made, None, Policy())

    def starts(*_: object, **__: object) -> None:
        raise AssertionError("a training was started")

    monkeypatch.setattr(train, "run_deployment", starts)
    assert train.request_training.fn(SNAPSHOT, REPORT) == branch
    assert train.find_candidate.fn(branch) == made[1]


def test_the_training_of_one_branch_is_one_run_by_its_key(wired: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def started(_name: str, **options: Any) -> None:
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run_deployment", started)
    monkeypatch.setattr(train, "attempt_key", lambda branch: f"{branch}/0")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train.request_training.fn(SNAPSHOT, REPORT)
    assert asked[0] == asked[1]
    assert asked[0]["idempotency_key"] == f"{asked[0]['parameters']['branch']}/0"


def test_a_finished_cycle_is_known_by_its_states_and_its_policy() -> None:
    store = MemoryStore()
    assert cycles.finished(store, DRAFTS, "s1", "p1") is None
    cycles.finish(store, DRAFTS, Cycle(states_commit="s1", policy="p1", drift=REPORT, candidate_branch="c"))
    found = cycles.finished(store, DRAFTS, "s1", "p1")
    assert found is not None
    assert (found.drift, found.candidate_branch) == (REPORT, "c")
    assert cycles.finished(store, DRAFTS, "s2", "p1") is None
    assert cycles.finished(store, DRAFTS, "s1", "p2") is None


class Shared(MemoryStore):
    """A store in which another writer commits the ledger's branch between our put and our commit."""

    def commit(self, repository: str, branch: str, message: str, metadata: Any) -> Commit:
        if branch == ledger.BRANCH and metadata.get("tide.ledger") == "drift":
            super().commit(repository, branch, "another's", {"tide.ledger": "other"})
        return super().commit(repository, branch, message, metadata)


def test_a_ledger_record_that_another_writers_commit_took_along_is_written() -> None:
    store = Shared()
    ledger.append(store, DRAFTS, "drift", REPORT)
    assert ledger.newest(store, DRAFTS, "drift", DriftReport) == REPORT
    assert not list(store.uncommitted(DRAFTS, ledger.BRANCH))


class Refusing(MemoryStore):
    """A store that says there is nothing to commit when there is."""

    def commit(self, repository: str, branch: str, message: str, metadata: Any) -> Commit:
        if branch == ledger.BRANCH:
            raise NothingToCommit("no changes")
        return super().commit(repository, branch, message, metadata)


def test_a_ledger_record_that_stays_staged_is_an_error() -> None:
    with pytest.raises(NothingToCommit):
        ledger.append(Refusing(), DRAFTS, "drift", REPORT)
