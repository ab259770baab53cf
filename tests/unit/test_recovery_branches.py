"""Branches that a dead run left: what goes, and what must stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.support.spooled import START, add_shard, harvester_of
from tide import repositories
from tide.domain import LineageRecord, Serving, ServingDraft
from tide.recovery import branches
from tide.recovery.branches import Leftover
from tide.serving.serving_file import SERVING

STATES, DRAFTS = "svc-states", "svc-drafts"
NOW = START + 3000
A = "a" * 64


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    repositories.ensure(store, STATES)
    repositories.ensure_drafts(store, DRAFTS)
    return store


def found(store: MemoryStore, *busy: str) -> dict[str, bool]:
    return {left.branch: left.done for left in branches.find(store, STATES, DRAFTS, busy)}


def half_harvested(store: MemoryStore, spool: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> str:
    """A harvest that dies in a call of the store."""
    spool.mkdir(exist_ok=True)
    add_shard(spool, 1, 2)

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, call, dies)
        with pytest.raises(KeyboardInterrupt):
            harvester_of(store, spool, STATES).run(NOW)
    [branch] = [b for b in store.branches(STATES) if b != "main"]
    return branch


def serve(store: MemoryStore, generation: int) -> None:
    branch = f"serving-{generation}-{A[:12]}"
    store.create_branch(DRAFTS, branch, "main")
    serving = Serving(generation=generation, stable=ServingDraft(digest=A))
    store.put(DRAFTS, branch, SERVING, serving.to_json().encode())
    store.commit(DRAFTS, branch, "serve", {})
    store.merge(DRAFTS, branch, "main", "serve", {})


def test_a_harvest_branch_whose_window_is_on_main_goes(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = half_harvested(store, tmp_path / "spool", monkeypatch, "delete_branch")
    [left] = branches.find(store, STATES, DRAFTS, ())
    assert (left.branch, left.done) == (branch, True)
    assert branches.remove(store, left)
    assert branches.remove(store, left), "again is harmless"
    assert list(store.branches(STATES)) == ["main"]


@pytest.mark.parametrize("call", ["commit", "merge"])
def test_a_harvest_branch_with_something_that_main_lacks_stays_and_the_next_harvest_finishes_it(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    branch = half_harvested(store, tmp_path / "spool", monkeypatch, call)
    assert found(store) == {branch: False}
    harvester_of(store, tmp_path / "spool", STATES).run(NOW)
    assert found(store) == {}


def test_a_branch_with_staged_objects_is_never_deleted(store: MemoryStore) -> None:
    branch = "harvest-20261130T000000Z-r0"
    store.create_branch(STATES, branch, "main")
    left = Leftover(STATES, branch, True, "looked empty")
    store.put(STATES, branch, "windows/x", b"x")
    assert not branches.remove(store, left)
    assert branch in list(store.branches(STATES))
    assert found(store) == {branch: False}


def test_branches_that_a_run_at_work_may_use_are_not_looked_at(store: MemoryStore) -> None:
    store.create_branch(STATES, "harvest-20261130T000000Z-r0", "main")
    store.create_branch(DRAFTS, "candidate-1", "main")
    assert found(store, "adapt") == {}
    assert found(store, "train") == {"harvest-20261130T000000Z-r0": True}
    assert found(store, "harvest") == {"candidate-1": True}


def test_a_serving_branch_goes_when_its_generation_is_past_and_stays_while_it_may_still_be_merged(
    store: MemoryStore,
) -> None:
    serve(store, 1)
    store.create_branch(DRAFTS, "serving-1-bbbbbbbbbbbb", "main")
    store.create_branch(DRAFTS, "serving-2-cccccccccccc", "main")
    assert found(store) == {f"serving-1-{A[:12]}": True, "serving-1-bbbbbbbbbbbb": True}


def test_a_generation_without_its_tag_gets_it_once(store: MemoryStore) -> None:
    assert not branches.finish_serving(store, DRAFTS)
    serve(store, 1)
    assert branches.finish_serving(store, DRAFTS)
    assert dict(store.tags(DRAFTS)).keys() == {f"gen-000001-{A[:12]}"}
    assert not branches.finish_serving(store, DRAFTS)


def test_a_candidates_branch_stays_and_one_that_never_held_a_candidate_goes(store: MemoryStore) -> None:
    for name in ("candidate-empty", "candidate-staged", "candidate-whole"):
        store.create_branch(DRAFTS, name, "main")
    store.put(DRAFTS, "candidate-staged", "drafts/x/config.json", b"{}")
    store.put(DRAFTS, "candidate-whole", "drafts/x/config.json", b"{}")
    record = LineageRecord(kind="candidate", subject=A)
    store.commit(DRAFTS, "candidate-whole", "candidate", record.to_metadata())
    assert found(store) == {"candidate-empty": True, "candidate-staged": False}


def test_without_repositories_there_is_nothing_to_find() -> None:
    assert branches.find(MemoryStore(), STATES, DRAFTS, ()) == []
