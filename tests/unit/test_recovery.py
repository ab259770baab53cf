"""What is taken for dead, at the threshold and on both sides of it."""

from __future__ import annotations

import pytest

from tide.recovery import rules as recovery
from tide.recovery.rules import BEAT_S, BEATS, Patience, ReconcileReport, Repair, RunView, SlotView

NOW = 10_000.0
PATIENCE = Patience(silent_s=300, second_look_s=90, pending_s=900, ended_s=120, scratch_s=3600)


def run(state: str = "RUNNING", *, since: float = NOW - 5000, beat: float | None = None) -> RunView:
    return RunView(id="1", name="brave-owl", flow="train", deployment="d", state=state, since=since, last_beat=beat)


def slots(held: int, *runs: str) -> SlotView:
    return SlotView(deployment="adapt/adapt", limit="deployment:1", held=held, runs=frozenset(runs))


@pytest.mark.parametrize(("silent", "dead"), [(299, False), (300, False), (301, True)])
def test_a_running_run_is_dead_when_its_heartbeats_stopped_for_longer_than_the_patience(
    silent: float, dead: bool
) -> None:
    found = recovery.stuck(run(beat=NOW - silent), NOW, PATIENCE)
    assert bool(found) is dead
    assert not dead or "without a heartbeat for 301 s" in str(found)


def test_a_run_that_never_beat_is_judged_by_when_it_began() -> None:
    assert recovery.stuck(run(since=NOW - 301), NOW, PATIENCE)
    assert recovery.stuck(run(since=NOW - 299), NOW, PATIENCE) is None


def test_a_run_that_was_resumed_is_not_judged_by_the_heartbeats_before_it_waited() -> None:
    assert recovery.stuck(run(since=NOW - 10, beat=NOW - 5000), NOW, PATIENCE) is None


@pytest.mark.parametrize(("waited", "dead"), [(900, False), (901, True)])
def test_a_pending_run_is_dead_when_its_worker_never_began_it(waited: float, dead: bool) -> None:
    assert bool(recovery.stuck(run("PENDING", since=NOW - waited), NOW, PATIENCE)) is dead


@pytest.mark.parametrize("state", ["PAUSED", "SCHEDULED", "COMPLETED", "CRASHED"])
def test_a_run_that_waits_or_is_over_is_never_dead(state: str) -> None:
    assert recovery.stuck(run(state, since=0, beat=0), NOW, PATIENCE) is None


def test_a_run_that_is_being_cancelled_and_silent_is_dead() -> None:
    assert recovery.stuck(run("CANCELLING", beat=NOW - 301), NOW, PATIENCE)


def test_a_run_that_beat_moved_or_ended_between_the_two_looks_lives() -> None:
    first = run(beat=NOW - 400)
    assert recovery.still_stuck(first, first, NOW + 90, PATIENCE)
    for again in (run(beat=NOW + 5), run("COMPLETED", beat=NOW - 400), run(since=NOW, beat=NOW - 400), None):
        assert recovery.still_stuck(first, again, NOW + 90, PATIENCE) is None


def test_the_usual_patience_is_longer_than_prefects_own_heartbeats_and_the_second_look_than_ours() -> None:
    assert Patience().silent_s > 180
    assert Patience().second_look_s > BEAT_S
    assert BEATS >= 3


@pytest.mark.parametrize(
    ("first", "again", "leaked"),
    [
        (slots(1), slots(1), 1),
        (slots(2, "a"), slots(2, "a"), 1),
        (slots(1, "a"), slots(1, "a"), 0),
        (slots(1), slots(0), 0),
        (slots(1), slots(1, "a"), 0),
        (slots(2, "a"), slots(2, "b"), 0),
    ],
)
def test_a_slot_is_leaked_when_two_readings_say_so_and_no_run_came_or_went(
    first: SlotView, again: SlotView, leaked: int
) -> None:
    assert recovery.leaked(first, again) == leaked


def test_training_is_orphaned_when_its_flow_died_or_its_run_is_over_for_a_while() -> None:
    over = run("CRASHED", since=NOW - 121)
    assert recovery.orphaned(False, run(), NOW, PATIENCE)
    assert recovery.orphaned(False, None, NOW, PATIENCE)
    assert recovery.orphaned(True, over, NOW, PATIENCE)
    assert recovery.orphaned(True, run("CRASHED", since=NOW - 119), NOW, PATIENCE) is None
    assert recovery.orphaned(True, run(), NOW, PATIENCE) is None
    assert recovery.orphaned(True, None, NOW, PATIENCE) is None, "another server's run is not ours to judge"


@pytest.mark.parametrize(
    ("alive", "members", "age", "goes"),
    [(False, 0, 3601, True), (False, 0, 3600, False), (True, 0, 9999, False), (False, 1, 9999, False)],
)
def test_scratch_goes_when_its_run_is_dead_and_nobody_will_look_into_it(
    alive: bool, members: int, age: float, goes: bool
) -> None:
    assert recovery.discarded(alive, members, age, PATIENCE) is goes


def test_the_report_names_what_was_found() -> None:
    repair = Repair(kind="slot", subject="adapt/adapt", found="1 slots are taken", outcome="mended")
    report = ReconcileReport(at=1.0, run="r", repairs=(repair, repair.model_copy(update={"outcome": "left"})))
    assert report.mended == 1
    assert "| slot | `adapt/adapt` | 1 slots are taken | mended |" in recovery.to_markdown(report)
    assert "All as it should be" in recovery.to_markdown(ReconcileReport(at=1.0, run="", repairs=()))
