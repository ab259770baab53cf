"""A rollout changes serving everywhere or nowhere, and what serves is always what ``serving.json`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tide import rollout
from tide.errors import Conflict, EngineError, EngineUnavailable, NotFound, SwapRefused
from tide.rollout import draft_prefix, read_serving

REPOSITORY = "svc-drafts"
A, B, C = "a" * 64, "b" * 64, "c" * 64


def store_with(*digests: str) -> MemoryStore:
    store = MemoryStore()
    store.create_repository(REPOSITORY)
    for digest in digests:
        branch = f"candidate-{digest[:6]}"
        store.create_branch(REPOSITORY, branch, "main")
        for name in ("config.json", "draft.json", "model.safetensors"):
            store.put(REPOSITORY, branch, draft_prefix(digest) + name, f"{name} of {digest[:3]}".encode())
        store.commit(REPOSITORY, branch, "candidate", {})
    return store


def promote(
    store: MemoryStore, digest: str, engines: list[FakeEngine], drafts: Path, generation: int, restart: object = None
) -> object:
    return rollout.promote(
        store,
        REPOSITORY,
        candidate_ref=f"candidate-{digest[:6]}",
        digest=digest,
        verdict="v" * 64,
        expected_generation=generation,
        replicas=engines,
        draft_dir=drafts,
        restart=restart,  # type: ignore[arg-type]
    )


def test_a_promotion_swaps_every_replica_and_then_records_it(tmp_path: Path) -> None:
    store, engines = store_with(A), [FakeEngine("r0"), FakeEngine("r1")]
    promotion = promote(store, A, engines, tmp_path, 0)
    serving = read_serving(store, REPOSITORY)
    assert [e.active_draft() for e in engines] == [A, A]
    assert (serving.generation, serving.stable and serving.stable.digest) == (1, A)
    assert (tmp_path / "serving").read_text().strip() == A
    assert (tmp_path / A / "model.safetensors").read_bytes() == f"model.safetensors of {A[:3]}".encode()
    assert [name for name, _ in store.tags(REPOSITORY)] == [f"gen-000001-{A[:12]}"]
    assert store.head(REPOSITORY, "main").metadata["tide.kind"] == "promotion"
    assert promotion.previous is None  # type: ignore[attr-defined]


def test_a_verdict_against_another_generation_is_stale(tmp_path: Path) -> None:
    store, engines = store_with(A, B), [FakeEngine()]
    promote(store, A, engines, tmp_path, 0)
    with pytest.raises(Conflict, match="evaluate the candidate again"):
        promote(store, B, engines, tmp_path, 0)
    assert engines[0].active_draft() == A


@pytest.mark.parametrize("lost_answer", [False, True], ids=["refused", "applied, answer lost"])
def test_when_the_second_replica_fails_all_get_the_incumbent_back(tmp_path: Path, lost_answer: bool) -> None:
    store, engines = store_with(A, B), [FakeEngine("r0"), FakeEngine("r1")]
    promote(store, A, engines, tmp_path, 0)

    def fail(digest: str) -> None:
        if digest == B:
            raise SwapRefused("no")

    if lost_answer:
        engines[1].after_swap = fail
    else:
        engines[1].before_swap = fail
    with pytest.raises(SwapRefused):
        promote(store, B, engines, tmp_path, 1)
    assert [e.active_draft() for e in engines] == [A, A]
    assert (tmp_path / "serving").read_text().strip() == A
    assert read_serving(store, REPOSITORY).generation == 1


def test_a_failed_first_promotion_leaves_no_draft_marked(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine(known=set())
    with pytest.raises(EngineError):
        promote(store, A, [engine], tmp_path, 0)
    assert not (tmp_path / "serving").exists()
    assert read_serving(store, REPOSITORY).stable is None


def test_when_the_record_cannot_be_merged_the_incumbent_serves_again(tmp_path: Path) -> None:
    store, engines = store_with(A, B), [FakeEngine()]
    promote(store, A, engines, tmp_path, 0)
    real = store.merge

    def conflict(*args: object, **kwargs: object) -> object:
        raise Conflict("someone was faster")

    store.merge = conflict  # type: ignore[assignment]
    with pytest.raises(Conflict):
        promote(store, B, engines, tmp_path, 1)
    store.merge = real  # type: ignore[method-assign]
    assert engines[0].active_draft() == A
    assert read_serving(store, REPOSITORY).stable.digest == A  # type: ignore[union-attr]


def test_a_promotion_that_lost_the_race_overwrites_nothing(tmp_path: Path) -> None:
    store, engine = store_with(A, B, C), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)

    def someone_is_faster(digest: str) -> None:
        engine.before_swap = None
        promote(store, C, [FakeEngine()], tmp_path / "other", 1)

    engine.before_swap = someone_is_faster
    with pytest.raises(Conflict, match="meanwhile"):
        promote(store, B, [engine], tmp_path, 1)
    assert read_serving(store, REPOSITORY).stable.digest == C  # type: ignore[union-attr]
    assert engine.active_draft() == A


def test_a_replica_without_a_draft_is_restarted_and_later_ones_are_swapped(tmp_path: Path) -> None:
    store, engine, restarts = store_with(A, B), FakeEngine(), []

    def restart(replica: FakeEngine, digest: str) -> float:
        restarts.append(digest)
        replica.swap_draft(digest)
        return 1.0

    assert promote(store, A, [engine], tmp_path, 0, restart).replicas[0].restarted  # type: ignore[attr-defined]
    assert not promote(store, B, [engine], tmp_path, 1, restart).replicas[0].restarted  # type: ignore[attr-defined]
    assert restarts == [A]


def test_a_rollback_is_a_new_generation_with_the_previous_draft(tmp_path: Path) -> None:
    store, engine = store_with(A, B), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    promote(store, B, [engine], tmp_path, 1)
    promotion = rollout.rollback(store, REPOSITORY, replicas=[engine], draft_dir=tmp_path)
    serving = read_serving(store, REPOSITORY)
    assert (promotion.kind, serving.generation, engine.active_draft()) == ("rollback", 3, A)
    assert serving.previous
    assert serving.previous.digest == B
    assert store.head(REPOSITORY, "main").metadata["tide.kind"] == "rollback"


def test_there_is_nothing_to_roll_back_to_after_the_first_promotion(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    with pytest.raises(NotFound, match="no previous draft"):
        rollout.rollback(store, REPOSITORY, replicas=[engine], draft_dir=tmp_path)


def test_reconcile_swaps_only_the_replicas_that_differ(tmp_path: Path) -> None:
    store, engines = store_with(A), [FakeEngine("r0"), FakeEngine("r1")]
    promote(store, A, engines, tmp_path, 0)
    engines[1].swap_draft(C)
    swaps = rollout.reconcile(store, REPOSITORY, replicas=engines, draft_dir=tmp_path / "other-host")
    assert [(s.replica, s.before, s.after) for s in swaps] == [("r1", C, A)]
    assert (tmp_path / "other-host" / A / "config.json").exists()


def test_reconcile_before_any_promotion_does_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(draft=C)
    assert rollout.reconcile(store_with(A), REPOSITORY, replicas=[engine], draft_dir=tmp_path) == []
    assert engine.active_draft() == C


def test_a_draft_is_installed_whole_or_not_at_all(tmp_path: Path) -> None:
    store = store_with(A)
    store.lose_bytes(REPOSITORY, f"candidate-{A[:6]}", draft_prefix(A) + "model.safetensors")
    with pytest.raises(Exception, match=r"model\.safetensors"):
        rollout.install_draft(store, REPOSITORY, f"candidate-{A[:6]}", A, tmp_path)
    assert not (tmp_path / A).exists()


def test_an_unreachable_replica_is_an_error_and_not_a_silent_skip(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine()
    engine.healthy = False
    with pytest.raises(EngineUnavailable):
        promote(store, A, [engine], tmp_path, 0)
