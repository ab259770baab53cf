"""A rollout changes serving everywhere or nowhere, and what serves is always what ``serving.json`` says."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.crashing_store import Crash, CrashPoint, crashing
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.signed import AUTHORITY, KEY, STRANGER, judge_and_promote, put_verdict, verdict_on
from tide.domain import CanaryRefusal, Promotion, Serving, ServingDraft
from tide.errors import Conflict, EngineUnavailable, NotFound, SignatureRefused, SwapRefused
from tide.lineage import ledger
from tide.policies import CanaryPolicy
from tide.repositories import ensure_drafts
from tide.serving import rollout
from tide.serving.rollout import Site, draft_prefix, read_serving
from tide.serving.serving_file import attestation_path, promotion_path

REPOSITORY = "svc-drafts"
A, B, C = "a" * 64, "b" * 64, "c" * 64


def store_with(*digests: str) -> MemoryStore:
    store = MemoryStore()
    ensure_drafts(store, REPOSITORY)
    for digest in digests:
        branch = f"candidate-{digest[:6]}"
        store.create_branch(REPOSITORY, branch, "main")
        for name in ("config.json", "draft.json", "model.safetensors"):
            store.put(REPOSITORY, branch, draft_prefix(digest) + name, f"{name} of {digest[:3]}".encode())
        store.commit(REPOSITORY, branch, "candidate", {})
    return store


def promote(
    store: MemoryStore, digest: str, engines: list[FakeEngine], drafts: Path, generation: int, restart: object = None
) -> Promotion | CanaryRefusal:
    where = Site(store, REPOSITORY, engines, drafts, restart)  # type: ignore[arg-type]
    branch = f"candidate-{digest[:6]}"
    return judge_and_promote(store, REPOSITORY, where, branch, digest, expected_generation=generation)


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
    assert promotion.previous is None


def test_a_verdict_against_another_generation_is_stale(tmp_path: Path) -> None:
    store, engines = store_with(A, B), [FakeEngine()]
    promote(store, A, engines, tmp_path, 0)
    with pytest.raises(Conflict, match="evaluate the candidate again"):
        promote(store, B, engines, tmp_path, 0)
    assert engines[0].active_draft() == A


def test_when_the_second_replica_refuses_all_get_the_incumbent_back_as_a_generation_of_its_own(tmp_path: Path) -> None:
    store, engines = store_with(A, B), [FakeEngine("r0"), FakeEngine("r1")]
    promote(store, A, engines, tmp_path, 0)

    def fail(digest: str) -> None:
        if digest == B:
            raise SwapRefused("no")

    engines[1].before_swap = fail
    refusal = promote(store, B, engines, tmp_path, 1)
    assert isinstance(refusal, CanaryRefusal)
    assert (refusal.report.outcome, "generation 3 is the incumbent again" in refusal.report.reasons[0]) == (
        "failed",
        True,
    )
    assert [e.active_draft() for e in engines] == [A, A]
    assert (tmp_path / "serving").read_text().strip() == A
    serving = read_serving(store, REPOSITORY)
    assert (serving.generation, serving.stable and serving.stable.digest, serving.canary) == (3, A, None)
    assert ledger.every(store, REPOSITORY, "canary", CanaryRefusal) == [refusal]


def test_a_swap_whose_answer_was_lost_is_asked_after_and_counts(tmp_path: Path) -> None:
    store, engines = store_with(A, B), [FakeEngine("r0"), FakeEngine("r1")]
    promote(store, A, engines, tmp_path, 0)

    def lose(digest: str) -> None:
        raise EngineUnavailable("r1: no answer")

    engines[1].after_swap = lose
    promotion = promote(store, B, engines, tmp_path, 1)
    assert isinstance(promotion, Promotion)
    assert [(s.replica, s.after, s.out_of_service) for s in promotion.replicas] == [("r0", B, ""), ("r1", B, "")]


def test_a_failed_first_promotion_leaves_no_draft_marked(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine(known=set())
    assert isinstance(promote(store, A, [engine], tmp_path, 0), CanaryRefusal)
    assert not (tmp_path / "serving").exists()
    assert read_serving(store, REPOSITORY).stable is None


def test_when_the_record_cannot_be_merged_the_incumbent_serves_again(tmp_path: Path) -> None:
    store, engines = store_with(A, B), [FakeEngine()]
    promote(store, A, engines, tmp_path, 0)
    real = store.merge

    def conflict(repository: str, source: str, *args: Any, **kwargs: Any) -> Any:
        if source.startswith("serving-"):
            raise Conflict("someone was faster")
        return real(repository, source, *args, **kwargs)

    store.merge = conflict  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        promote(store, B, engines, tmp_path, 1)
    store.merge = real  # type: ignore[method-assign]
    assert engines[0].active_draft() == A
    assert read_serving(store, REPOSITORY).stable.digest == A  # type: ignore[union-attr]


def test_a_second_promotion_is_told_to_wait_while_the_first_has_its_canary(tmp_path: Path) -> None:
    store, engine = store_with(A, B, C), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    told = []

    def another(_: str) -> None:
        engine.before_swap = None
        with pytest.raises(Conflict, match="draft bbbbbbbbbbbb is on trial on fake-0") as caught:
            promote(store, C, [FakeEngine()], tmp_path / "other", 1)
        told.append(caught.value)

    engine.before_swap = another
    promote(store, B, [engine], tmp_path, 1)
    assert told
    assert engine.active_draft() == B


def test_a_promotion_that_lost_the_race_overwrites_nothing(tmp_path: Path) -> None:
    store, engine = store_with(A, B, C), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    promote(store, B, [engine], tmp_path, 1)

    def someone_is_faster(_: str) -> None:
        engine.before_swap = None
        rollout.rollback(Site(store, REPOSITORY, [FakeEngine()], tmp_path / "other"), AUTHORITY)

    engine.before_swap = someone_is_faster
    with pytest.raises(Conflict, match="meanwhile"):
        promote(store, C, [engine], tmp_path, 2)
    assert read_serving(store, REPOSITORY).stable.digest == A  # type: ignore[union-attr]
    assert engine.active_draft() == A, "the loser serves what the winner put back"


def test_a_replica_without_a_draft_is_restarted_and_later_ones_are_swapped(tmp_path: Path) -> None:
    store, engine, restarts = store_with(A, B), FakeEngine(), []

    def restart(replica: FakeEngine, digest: str) -> float:
        restarts.append(digest)
        replica.swap_draft(digest)
        return 1.0

    assert [s.restarted for s in promote(store, A, [engine], tmp_path, 0, restart).replicas] == [True]
    assert [s.restarted for s in promote(store, B, [engine], tmp_path, 1, restart).replicas] == [False]
    assert restarts == [A]


def test_a_rollback_is_a_new_generation_with_the_previous_draft(tmp_path: Path) -> None:
    store, engine = store_with(A, B), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    promote(store, B, [engine], tmp_path, 1)
    promotion = rollout.rollback(Site(store, REPOSITORY, [engine], tmp_path), AUTHORITY)
    serving = read_serving(store, REPOSITORY)
    assert (promotion.kind, serving.generation, engine.active_draft()) == ("rollback", 3, A)
    assert serving.previous
    assert serving.previous.digest == B
    assert store.head(REPOSITORY, "main").metadata["tide.kind"] == "rollback"


def test_there_is_nothing_to_roll_back_to_after_the_first_promotion(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    with pytest.raises(NotFound, match="no previous draft"):
        rollout.rollback(Site(store, REPOSITORY, [engine], tmp_path), AUTHORITY)


def test_reconcile_swaps_only_the_replicas_that_differ(tmp_path: Path) -> None:
    store, engines = store_with(A), [FakeEngine("r0"), FakeEngine("r1")]
    promote(store, A, engines, tmp_path, 0)
    engines[1].swap_draft(C)
    swaps = rollout.reconcile(Site(store, REPOSITORY, engines, tmp_path / "other-host"), AUTHORITY.trusted)
    assert [(s.replica, s.before, s.after) for s in swaps] == [("r1", C, A)]
    assert (tmp_path / "other-host" / A / "config.json").exists()


def test_reconcile_before_any_promotion_does_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(draft=C)
    assert rollout.reconcile(Site(store_with(A), REPOSITORY, [engine], tmp_path), AUTHORITY.trusted) == []
    assert engine.active_draft() == C


def test_a_draft_is_installed_whole_or_not_at_all(tmp_path: Path) -> None:
    store = store_with(A)
    store.lose_bytes(REPOSITORY, f"candidate-{A[:6]}", draft_prefix(A) + "model.safetensors")
    with pytest.raises(Exception, match=r"model\.safetensors"):
        rollout.install_draft(store, REPOSITORY, f"candidate-{A[:6]}", A, tmp_path)
    assert not (tmp_path / A).exists()


def test_when_no_replica_answers_nothing_is_changed(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine()
    engine.healthy = False
    with pytest.raises(EngineUnavailable):
        promote(store, A, [engine], tmp_path, 0)
    assert read_serving(store, REPOSITORY) == Serving()


def test_an_imported_draft_that_served_before_the_first_promotion_is_given_back(tmp_path: Path) -> None:
    store, engines = store_with(A), [FakeEngine("r0", draft=C), FakeEngine("r1", draft=C, known={C})]
    assert isinstance(promote(store, A, engines, tmp_path, 0), CanaryRefusal)
    assert [e.active_draft() for e in engines] == [C, C]
    assert read_serving(store, REPOSITORY) == Serving()


# What may serve: signatures


def refused(store: MemoryStore, engine: FakeEngine, drafts: Path, why: str) -> None:
    """A promotion of A is refused, and nothing was touched."""
    where = Site(store, REPOSITORY, [engine], drafts)
    with pytest.raises(SignatureRefused, match=why):
        rollout.promote(where, AUTHORITY, candidate_ref=f"candidate-{A[:6]}", digest=A, expected_generation=0)
    assert engine.swaps == []
    assert read_serving(store, REPOSITORY) == Serving()


def test_a_candidate_without_a_verdict_is_refused(tmp_path: Path) -> None:
    refused(store_with(A), FakeEngine(draft=C), tmp_path, "no signed verdict")


def test_a_forged_verdict_is_refused(tmp_path: Path) -> None:
    store = store_with(A)
    put_verdict(store, REPOSITORY, f"candidate-{A[:6]}", verdict_on(A, outcome="reject"), forged=True)
    refused(store, FakeEngine(draft=C), tmp_path, "not over this content")


def test_a_verdict_of_a_stranger_is_refused(tmp_path: Path) -> None:
    store = store_with(A)
    put_verdict(store, REPOSITORY, f"candidate-{A[:6]}", verdict_on(A), key=STRANGER)
    refused(store, FakeEngine(draft=C), tmp_path, "not trusted here")


def test_a_verdict_that_does_not_say_promote_is_refused(tmp_path: Path) -> None:
    store = store_with(A)
    put_verdict(store, REPOSITORY, f"candidate-{A[:6]}", verdict_on(A, outcome="inconclusive"))
    refused(store, FakeEngine(draft=C), tmp_path, "is inconclusive, not promote")


def test_a_verdict_on_another_draft_is_refused(tmp_path: Path) -> None:
    store, branch = store_with(A), f"candidate-{A[:6]}"
    signed = KEY.sign("verdict", verdict_on(B))
    store.put(REPOSITORY, branch, f"{draft_prefix(A)}verdict.signed.json", signed.to_json().encode())
    store.commit(REPOSITORY, branch, "somebody else's verdict", {})
    refused(store, FakeEngine(draft=C), tmp_path, "is about draft bbb")


def test_a_verdict_against_a_draft_that_no_longer_serves_is_stale(tmp_path: Path) -> None:
    store, engine = store_with(A, B), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    branch = f"candidate-{B[:6]}"
    put_verdict(store, REPOSITORY, branch, verdict_on(B, incumbent=C))
    with pytest.raises(Conflict, match="was made against ccc"):
        rollout.promote(
            Site(store, REPOSITORY, [engine], tmp_path),
            AUTHORITY,
            candidate_ref=branch,
            digest=B,
            expected_generation=1,
        )
    assert engine.active_draft() == A


def test_reconcile_touches_no_replica_when_somebody_changed_what_serves_by_hand(tmp_path: Path) -> None:
    store, engine = store_with(A, B), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    by_hand = Serving(generation=2, stable=ServingDraft(digest=B), previous=None)
    store.create_branch(REPOSITORY, "by-hand", "main")
    store.put(REPOSITORY, "by-hand", "serving.json", by_hand.to_json().encode())
    store.commit(REPOSITORY, "by-hand", "quick fix", {})
    store.merge(REPOSITORY, "by-hand", "main", "quick fix", {})
    where = Site(store, REPOSITORY, [engine], tmp_path)
    with pytest.raises(SignatureRefused, match="around the promoter"):
        rollout.reconcile(where, AUTHORITY.trusted)
    copied = store.read(REPOSITORY, "main", attestation_path(1))
    store.create_branch(REPOSITORY, "by-hand-2", "main")
    store.put(REPOSITORY, "by-hand-2", attestation_path(2), copied)
    store.commit(REPOSITORY, "by-hand-2", "with an old attestation", {})
    store.merge(REPOSITORY, "by-hand-2", "main", "with an old attestation", {})
    with pytest.raises(SignatureRefused, match="not for bbb"):
        rollout.reconcile(where, AUTHORITY.trusted)
    assert engine.active_draft() == A


# Killed, and run again


LEASE_OVER_S = CanaryPolicy().lease_s + 1


def promoted_until(tmp_path: Path, point: CrashPoint) -> tuple[MemoryStore, list[FakeEngine], Site, str]:
    """A serves; the promotion of B runs into the crash point."""
    store, engines = store_with(A, B), [FakeEngine("r0"), FakeEngine("r1")]
    promote(store, A, engines, tmp_path, 0)
    branch = f"candidate-{B[:6]}"
    put_verdict(store, REPOSITORY, branch, verdict_on(B, incumbent=A))
    with contextlib.suppress(Crash):
        rollout.resume(Site(crashing(store, point), REPOSITORY, engines, tmp_path), AUTHORITY, branch)
    return store, engines, Site(store, REPOSITORY, engines, tmp_path), branch


def steps_of_a_promotion(tmp_path: Path) -> int:
    promoted_until(tmp_path, point := CrashPoint())
    return point.steps


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_promotion_killed_at_any_call_of_the_store_is_finished_by_the_next_run(tmp_path: Path, after: bool) -> None:
    for at in range(steps_of_a_promotion(tmp_path / "count")):
        store, engines, where, branch = promoted_until(tmp_path / f"{at}", CrashPoint(at, after=after))
        promotion = rollout.resume(where, AUTHORITY, branch)
        assert isinstance(promotion, Promotion), at
        serving = read_serving(store, REPOSITORY)
        assert (promotion.generation, promotion.draft, serving.generation, serving.canary) == (2, B, 2, None), at
        assert [e.active_draft() for e in engines] == [B, B], at
        assert [name for name, _ in store.tags(REPOSITORY)][-1] == f"gen-000002-{B[:12]}", at
        assert [b for b in store.branches(REPOSITORY) if b.startswith(("serving-", "canary-"))] == [], at
        assert len(list(store.list(REPOSITORY, "main", "promotions/"))) == 2, at
        assert store.read(REPOSITORY, "main", promotion_path(2)), at


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_after_a_promoter_died_anywhere_one_reconcile_makes_every_replica_match(tmp_path: Path, after: bool) -> None:
    """The lease is over by then: the promoter did not come back."""
    for at in range(steps_of_a_promotion(tmp_path / "count")):
        store, engines, where, _ = promoted_until(tmp_path / f"{at}", CrashPoint(at, after=after))
        later = dataclasses.replace(where, clock=lambda: time.time() + LEASE_OVER_S)
        rollout.reconcile(later, AUTHORITY)
        serving = read_serving(store, REPOSITORY)
        assert serving.stable, at
        assert [e.active_draft() for e in engines] == [serving.stable.digest] * 2, at
        assert serving.canary is None, at
        assert (tmp_path / f"{at}" / "serving").read_text().strip() == serving.stable.digest, at
        assert rollout.reconcile(later, AUTHORITY) == [], at


def test_a_rollback_run_twice_for_one_generation_goes_back_once(tmp_path: Path) -> None:
    store, engine = store_with(A, B), FakeEngine()
    promote(store, A, [engine], tmp_path, 0)
    promote(store, B, [engine], tmp_path, 1)
    where = Site(store, REPOSITORY, [engine], tmp_path)
    first = rollout.rollback(where, AUTHORITY, expected_generation=2)
    assert rollout.rollback(where, AUTHORITY, expected_generation=2) == first
    assert (read_serving(store, REPOSITORY).generation, engine.active_draft()) == (3, A)
    with pytest.raises(Conflict, match="generation 3 serves, not 1"):
        rollout.rollback(where, AUTHORITY, expected_generation=1)
