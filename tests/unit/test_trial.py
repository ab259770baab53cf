"""A candidate is tried on one replica, and the incumbent comes back whatever goes wrong there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.support.signed import AUTHORITY, judge_and_promote, put_verdict, verdict_on
from tests.unit.test_rollout import REPOSITORY, A, B, C, store_with
from tide.canary import lease as canary_lease
from tide.domain import CanaryLease, CanaryRefusal, CanaryReport, Promotion, Serving
from tide.engine.base import Generation
from tide.errors import BadInputError, CanaryBusy, Conflict, EngineError, EngineUnavailable, NotFound, SwapRefused
from tide.lineage import ledger
from tide.policies import CanaryPolicy
from tide.serving import promoter, rollout
from tide.serving.rollout import Site, read_serving
from tide.serving.serving_file import read_promotion

GOOD = CanaryReport(outcome="passed", reasons=("no regression in 100 requests",), figures={"requests": 100.0})
WORSE = CanaryReport(outcome="regression", reasons=("below the incumbent",), figures={"requests": 31.0})
PATIENT = CanaryPolicy(answer_s=0.01)


class Seen:
    """A watch that has seen this, and what the service looked like meanwhile."""

    def __init__(self, report: CanaryReport, during: Callable[[], None] = lambda: None) -> None:
        self.report, self.during = report, during
        self.asked: list[tuple[str, str, str | None]] = []

    def __call__(self, replica: Any, *, candidate: str, incumbent: str | None, since: float, still_ours: Any) -> Any:
        self.asked.append((replica.name, candidate, incumbent))
        self.during()
        still_ours()
        return self.report


class Rig:
    """A serves on every replica, B is judged and wants to."""

    def __init__(self, folder: Path, replicas: int = 2) -> None:
        self.store = store_with(A, B, C)
        self.engines = [FakeEngine(f"r{n}") for n in range(replicas)]
        self.site = Site(self.store, REPOSITORY, self.engines, folder, policy=PATIENT)
        judge_and_promote(self.store, REPOSITORY, self.site, "candidate-aaaaaa", A)
        put_verdict(self.store, REPOSITORY, "candidate-bbbbbb", verdict_on(B, incumbent=A))

    def promote(self, **changes: Any) -> Promotion | CanaryRefusal:
        return rollout.resume(dataclasses.replace(self.site, **changes), AUTHORITY, "candidate-bbbbbb")

    @property
    def drafts(self) -> list[str]:
        return [engine._draft for engine in self.engines]

    @property
    def serving(self) -> Serving:
        return read_serving(self.store, REPOSITORY)

    def leave_lease(self, **changes: Any) -> CanaryLease:
        """What a promoter of B left when it died with the candidate on r0."""
        lease = CanaryLease(
            draft=B,
            verdict=verdict_on(B, incumbent=A).digest(),
            replicas=("r0",),
            run="elsewhere/1/1",
            lease_until=time.time() + 900,
        ).model_copy(update=changes)
        statement = AUTHORITY.key.sign("verdict", verdict_on(B, incumbent=A))
        canary_lease.take(self.store, REPOSITORY, self.serving, lease, statement)
        self.engines[0].swap_draft(B)
        return lease


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_first_replica_is_watched_before_the_others_are_touched(rig: Rig) -> None:
    found: list[Any] = []
    watch = Seen(GOOD, lambda: found.append((rig.drafts, rig.serving)))
    promotion = rig.promote(watch=watch)
    ((drafts, serving),) = found
    assert watch.asked == [("r0", B, A)]
    assert drafts == [B, A]
    assert (serving.generation, serving.stable.digest) == (1, A)
    assert (serving.canary.draft, serving.canary.replicas, serving.canary.run) == (B, ("r0",), rig.site.run)
    assert isinstance(promotion, Promotion)
    assert promotion.canary == GOOD
    assert (rig.drafts, rig.serving.generation, rig.serving.canary) == ([B, B], 2, None)


def test_while_a_candidate_is_tried_a_replica_that_starts_loads_the_incumbent(rig: Rig) -> None:
    marks = []
    rig.promote(watch=Seen(GOOD, lambda: marks.append((rig.site.draft_dir / "serving").read_text().strip())))
    assert marks == [A]
    assert (rig.site.draft_dir / "serving").read_text().strip() == B


@pytest.mark.parametrize("outcome", ["regression", "engine", "dead", "failed"])
def test_what_the_watch_refuses_is_taken_back_recorded_and_never_reaches_the_others(rig: Rig, outcome: str) -> None:
    report = WORSE.model_copy(update={"outcome": outcome})
    refusal = rig.promote(watch=Seen(report))
    assert isinstance(refusal, CanaryRefusal)
    assert (refusal.report, refusal.previous, refusal.generation, refusal.lease.draft) == (report, A, 2, B)
    assert [(s.replica, s.after, s.out_of_service) for s in refusal.replicas] == [("r0", A, "")]
    assert rig.drafts == [A, A]
    assert rig.engines[1].swaps == [("none", A)]
    assert (rig.serving.generation, rig.serving.canary) == (1, None)
    assert ledger.every(rig.store, REPOSITORY, "canary", CanaryRefusal) == [refusal]
    assert any(o.path.endswith(".sig") for o in rig.store.list(REPOSITORY, "ledger", "ledger/"))
    assert rollout.reconcile(rig.site, AUTHORITY) == []


def test_a_verdict_whose_canary_was_refused_is_refused_again_without_another_trial(rig: Rig) -> None:
    first = rig.promote(watch=Seen(WORSE))
    again = Seen(GOOD)
    assert rig.promote(watch=again) == first
    assert again.asked == []
    assert rig.drafts == [A, A]


def test_a_canary_that_a_replica_failed_may_be_tried_again(rig: Rig) -> None:
    rig.promote(watch=Seen(WORSE.model_copy(update={"outcome": "failed"})))
    assert isinstance(rig.promote(watch=Seen(GOOD)), Promotion)


def test_too_little_traffic_lets_it_pass_and_main_says_how_little(rig: Rig) -> None:
    little = CanaryReport(outcome="passed", reasons=("little traffic: 2 requests",), figures={"requests": 2.0})
    rig.promote(watch=Seen(little))
    assert read_promotion(rig.store, REPOSITORY, 2).canary == little


def test_a_policy_of_no_requests_watches_nothing_and_verifies_all_the_same(rig: Rig) -> None:
    watch = Seen(WORSE)
    promotion = rig.promote(watch=watch, policy=CanaryPolicy(max_requests=0))
    assert isinstance(promotion, Promotion)
    assert promotion.canary is not None
    assert (watch.asked, promotion.canary.outcome) == ([], "off")
    assert rig.engines[0].generated[-1] == B


# A replica that fails


class Silent(FakeEngine):
    """Its web server answers, and its scheduler generates nothing once it has the candidate."""

    def probe(self, *, timeout_s: float) -> Generation:
        if self._draft == B:
            raise EngineUnavailable(f"{self.name}: no answer in {timeout_s:g} s")
        return super().probe(timeout_s=timeout_s)


class Plain(FakeEngine):
    """Answers without drafting."""

    def probe(self, *, timeout_s: float) -> Generation:
        return super().probe(timeout_s=timeout_s).model_copy(update={"verify_steps": 0 if self._draft == B else 3})


@pytest.mark.parametrize(("kind", "why"), [(Silent, "no answer in"), (Plain, "without verify steps")])
def test_a_swap_counts_once_a_token_was_generated_with_verify_steps(rig: Rig, kind: type[FakeEngine], why: str) -> None:
    rig.engines[0] = kind("r0", draft=A)
    refusal = rig.promote(replicas=rig.engines, watch=Seen(GOOD))
    assert isinstance(refusal, CanaryRefusal)
    assert refusal.report.outcome == "failed"
    assert why in refusal.report.reasons[0]
    assert rig.drafts == [A, A]


def test_a_replica_that_has_another_draft_after_the_swap_ends_it(rig: Rig) -> None:
    rig.engines[0].after_swap = lambda digest: setattr(rig.engines[0], "_draft", C if digest == B else digest)
    refusal = rig.promote(watch=Seen(GOOD))
    assert isinstance(refusal, CanaryRefusal)
    assert "reports draft ccc" in refusal.report.reasons[0]
    assert rig.drafts == [A, A]


def test_a_replica_too_busy_to_swap_at_once_is_asked_again(rig: Rig) -> None:
    def busy(_: str) -> None:
        rig.engines[0].before_swap = None
        raise EngineUnavailable("r0: no answer in 30 s: long prefills")

    rig.engines[0].before_swap = busy
    patient = CanaryPolicy(answer_s=5)
    assert isinstance(rig.promote(watch=Seen(GOOD), policy=patient), Promotion)
    assert rig.drafts == [B, B]


def test_a_replica_that_lacks_the_draft_says_which_folder_it_must_be_in(rig: Rig) -> None:
    def missing(digest: str) -> None:
        if digest == B:
            raise SwapRefused(f"r0: draft {digest[:12]} is not in /drafts")

    rig.engines[0].before_swap = missing
    refusal = rig.promote(watch=Seen(GOOD))
    assert isinstance(refusal, CanaryRefusal)
    assert "a replica on another host" in refusal.report.reasons[0]


def test_a_canary_that_stops_answering_is_named_as_out_of_service_and_the_incumbent_comes_back(rig: Rig) -> None:
    def dies() -> None:
        rig.engines[0].healthy = False

    refusal = rig.promote(watch=Seen(WORSE.model_copy(update={"outcome": "failed"}), dies))
    assert isinstance(refusal, CanaryRefusal)
    assert [(s.replica, "not healthy" in s.out_of_service) for s in refusal.replicas] == [("r0", True)]
    assert rig.drafts == [B, A]
    (named,) = rollout.reconcile(rig.site, AUTHORITY)
    assert (named.replica, "not healthy" in named.out_of_service) == ("r0", True)
    rig.engines[0].healthy = True
    assert [(s.before, s.after) for s in rollout.reconcile(rig.site, AUTHORITY)] == [(B, A)]


def test_an_unreachable_replica_is_named_and_the_next_one_is_the_canary(rig: Rig) -> None:
    rig.engines[0].healthy = False
    watch = Seen(GOOD)
    promotion = rig.promote(watch=watch)
    assert isinstance(promotion, Promotion)
    assert watch.asked == [("r1", B, A)]
    assert [(s.replica, bool(s.out_of_service)) for s in promotion.replicas] == [("r1", False), ("r0", True)]
    assert rig.drafts == [A, B]


def test_where_policy_says_stop_an_unreachable_replica_ends_it_before_anything_changes(rig: Rig) -> None:
    rig.engines[1].healthy = False
    stop = CanaryPolicy(answer_s=0.01, unreachable="stop")
    with pytest.raises(EngineUnavailable, match="r1"):
        rig.promote(watch=Seen(GOOD), policy=stop)
    assert (rig.drafts, rig.serving.canary) == ([A, A], None)


def test_where_policy_says_stop_a_replica_lost_later_brings_the_incumbent_back(rig: Rig) -> None:
    def dies() -> None:
        rig.engines[1].healthy = False

    refusal = rig.promote(watch=Seen(GOOD, dies), policy=CanaryPolicy(answer_s=0.01, unreachable="stop"))
    assert isinstance(refusal, CanaryRefusal)
    assert rig.drafts == [A, A]
    assert (rig.serving.generation, rig.serving.stable and rig.serving.stable.digest) == (3, A)


def test_a_replica_that_had_no_draft_before_a_refused_first_one_is_named(tmp_path: Path) -> None:
    store, engine = store_with(A), FakeEngine("r0")
    put_verdict(store, REPOSITORY, "candidate-aaaaaa", verdict_on(A))
    site = Site(store, REPOSITORY, [engine], tmp_path, policy=PATIENT, watch=Seen(WORSE))
    refusal = rollout.resume(site, AUTHORITY, "candidate-aaaaaa")
    assert isinstance(refusal, CanaryRefusal)
    assert [(s.replica, "keeps draft aaa" in s.out_of_service) for s in refusal.replicas] == [("r0", True)]
    assert (read_serving(store, REPOSITORY), (tmp_path / "serving").exists()) == (Serving(), False)


# Three replicas: one refuses, one times out after applying, the promoter dies between the first and the second


class Killed(BaseException):
    """As a kill: nothing catches it."""


def test_three_replicas_end_with_one_draft_or_are_named_within_one_reconcile(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replicas=3)

    def killed(digest: str) -> None:
        raise Killed

    rig.engines[1].before_swap = killed
    with pytest.raises(Killed):
        rig.promote(watch=Seen(GOOD))
    assert (rig.drafts, rig.serving.generation) == ([B, A, A], 2)

    def refuses(digest: str) -> None:
        raise SwapRefused("r1: no")

    def times_out(digest: str) -> None:
        raise EngineUnavailable("r2: timed out")

    rig.engines[1].before_swap, rig.engines[2].after_swap = refuses, times_out
    swaps = {swap.replica: swap for swap in rollout.reconcile(rig.site, AUTHORITY)}
    assert rig.drafts == [B, A, B]
    assert set(swaps) == {"r1", "r2"}
    assert ("no" in swaps["r1"].out_of_service, swaps["r2"].out_of_service) == (True, "")


@pytest.mark.parametrize("at", ["before_swap", "after_swap"])
def test_a_promoter_killed_at_the_swap_of_any_replica_is_finished_by_the_next_run(tmp_path: Path, at: str) -> None:
    for number in range(3):
        rig = Rig(tmp_path / f"{number}", replicas=3)

        def killed(digest: str, engine: FakeEngine = rig.engines[number]) -> None:
            setattr(engine, at, None)
            raise Killed

        setattr(rig.engines[number], at, killed)
        with pytest.raises(Killed):
            rig.promote(watch=Seen(GOOD))
        promotion = rig.promote(watch=Seen(GOOD))
        assert isinstance(promotion, Promotion)
        assert (promotion.generation, rig.drafts, rig.serving.canary) == (2, [B, B, B], None)


def test_a_promoter_killed_after_it_recorded_a_refusal_only_gives_the_lease_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(canary_lease, "release", killed)
        with pytest.raises(Killed):
            rig.promote(watch=Seen(WORSE))
    assert rig.serving.canary is not None
    again = Seen(GOOD)
    refusal = rig.promote(watch=again)
    assert isinstance(refusal, CanaryRefusal)
    assert (again.asked, rig.drafts, rig.serving.canary) == ([], [A, A], None)
    assert ledger.every(rig.store, REPOSITORY, "canary", CanaryRefusal) == [refusal]


# Leases of others


def test_reconcile_leaves_a_canary_under_way_alone_and_matches_the_others(rig: Rig) -> None:
    rig.leave_lease()
    rig.engines[1].swap_draft(C)
    assert [(s.replica, s.after) for s in rollout.reconcile(rig.site, AUTHORITY)] == [("r1", A)]
    assert rig.drafts == [B, A]
    assert rig.serving.canary is not None


@pytest.mark.parametrize("signer", [AUTHORITY, AUTHORITY.trusted], ids=["with the key", "without"])
def test_reconcile_ends_a_canary_whose_lease_is_over_with_the_incumbent(rig: Rig, signer: Any) -> None:
    lease = rig.leave_lease(lease_until=time.time() - 1)
    assert [(s.replica, s.before, s.after) for s in rollout.reconcile(rig.site, signer)] == [("r0", B, A)]
    assert (rig.drafts, rig.serving.canary) == ([A, A], None)
    (refusal,) = ledger.every(rig.store, REPOSITORY, "canary", CanaryRefusal)
    assert (refusal.lease, refusal.report.outcome) == (lease, "failed")
    assert rollout.reconcile(rig.site, signer) == []


def test_a_lease_ends_at_its_very_moment(rig: Rig) -> None:
    rig.leave_lease(lease_until=1000.0)
    assert rollout.reconcile(dataclasses.replace(rig.site, clock=lambda: 999.999), AUTHORITY) == []
    assert len(rollout.reconcile(dataclasses.replace(rig.site, clock=lambda: 1000.0), AUTHORITY)) == 1


def test_the_canary_of_a_promoter_on_another_host_is_waited_for(rig: Rig) -> None:
    rig.leave_lease()
    with pytest.raises(Conflict, match="by elsewhere/1/1 until"):
        rig.promote(watch=Seen(GOOD))
    assert rig.drafts == [B, A]


def test_the_canary_of_a_process_of_this_host_that_is_no_more_is_gone_on_with(rig: Rig) -> None:
    host = promoter.owner().partition("/")[0]
    lease = rig.leave_lease(run=f"{host}/{2**22 + 1}/5")
    found: list[CanaryLease | None] = []
    assert isinstance(rig.promote(watch=Seen(GOOD, lambda: found.append(rig.serving.canary))), Promotion)
    assert found == [lease]


def test_the_canary_on_a_replica_that_is_not_among_ours_is_waited_for(rig: Rig) -> None:
    host = promoter.owner().partition("/")[0]
    rig.leave_lease(run=f"{host}/{2**22 + 1}/5", replicas=("r7",))
    with pytest.raises(CanaryBusy, match="runs on r7, which TIDE_REPLICAS does not name"):
        rig.promote(watch=Seen(GOOD))


def test_another_candidate_ends_the_canary_of_a_promoter_that_died(rig: Rig) -> None:
    host = promoter.owner().partition("/")[0]
    rig.leave_lease(run=f"{host}/{2**22 + 1}/5")
    put_verdict(rig.store, REPOSITORY, "candidate-cccccc", verdict_on(C, incumbent=A))
    promotion = rollout.resume(rig.site, AUTHORITY, "candidate-cccccc")
    assert isinstance(promotion, Promotion)
    assert rig.drafts == [C, C]
    (refusal,) = ledger.every(rig.store, REPOSITORY, "canary", CanaryRefusal)
    assert refusal.lease.draft == B


def test_this_very_process_lives_and_one_with_its_number_and_another_start_does_not() -> None:
    assert not promoter.has_died(promoter.owner())
    host, pid, start = promoter.owner().split("/")
    assert promoter.has_died(f"{host}/{pid}/{int(start) + 1}")
    assert not promoter.has_died(f"another-{host}/{pid}/{int(start) + 1}")


def test_a_rollback_while_a_candidate_is_tried_ends_the_trial(rig: Rig) -> None:
    judge_and_promote(rig.store, REPOSITORY, rig.site, "candidate-cccccc", C)
    put_verdict(rig.store, REPOSITORY, "candidate-bbbbbb", verdict_on(B, incumbent=C))
    other = dataclasses.replace(rig.site, replicas=rig.engines[1:])
    with pytest.raises(Conflict, match="was ended by another change"):
        rig.promote(watch=Seen(GOOD, lambda: (rollout.rollback(other, AUTHORITY), None)[1]))
    assert (rig.drafts, rig.serving.generation, rig.serving.canary) == ([A, A], 3, None)


# Back to any promoted draft


@pytest.fixture
def three(rig: Rig) -> Rig:
    """A, B and C served, in this order; C serves."""
    rig.promote()
    judge_and_promote(rig.store, REPOSITORY, rig.site, "candidate-cccccc", C)
    return rig


@pytest.mark.parametrize("to", ["gen-1", "gen-000001", f"gen-000001-{A[:12]}", A, A[:6]])
def test_a_rollback_goes_to_any_draft_that_was_promoted(three: Rig, to: str) -> None:
    promotion = rollout.rollback(three.site, AUTHORITY, to=to)
    assert (promotion.kind, promotion.generation, promotion.draft, promotion.previous) == ("rollback", 4, A, C)
    assert three.drafts == [A, A]
    assert promotion.verdict == verdict_on(A).digest()


@pytest.mark.parametrize(
    ("to", "error", "why"),
    [
        ("gen-9", NotFound, "never in serving"),
        ("d" * 64, NotFound, "never in serving"),
        ("aaaaa", BadInputError, "6 or more digits"),
        ("../../etc", BadInputError, "is no draft"),
        ("gen-3", BadInputError, "serves already"),
    ],
)
def test_a_rollback_to_what_never_served_or_serves_already_changes_nothing(
    three: Rig, to: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        rollout.rollback(three.site, AUTHORITY, to=to)
    assert (three.drafts, three.serving.generation) == ([C, C], 3)


def test_a_rollback_is_not_stopped_by_replicas_that_the_draft_took_down(three: Rig) -> None:
    for engine in three.engines:
        engine.healthy = False
    promotion = rollout.rollback(three.site, AUTHORITY)
    assert [bool(s.out_of_service) for s in promotion.replicas] == [True, True]
    assert (three.site.draft_dir / "serving").read_text().strip() == B
    for engine in three.engines:
        engine.healthy = True
    rollout.reconcile(three.site, AUTHORITY)
    assert three.drafts == [B, B]


def test_a_rollback_that_a_replica_refuses_leaves_what_serves(three: Rig) -> None:
    def refuses(digest: str) -> None:
        if digest == B:
            raise EngineError("r0: broken")

    three.engines[0].before_swap = refuses
    with pytest.raises(EngineError, match="broken"):
        rollout.rollback(three.site, AUTHORITY)
    assert (three.drafts, three.serving.generation) == ([C, C], 3)
