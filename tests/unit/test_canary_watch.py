"""The watch: real shards and request tables in a spool, walked by the real evaluator, beside a scripted replica."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.support.tiny import TARGET, embedding_of, request_info, tiny_bundle, tiny_draft, tiny_states
from tide.canary.watch import CanaryWatch
from tide.domain import PROBE_SLICE, CanaryReport, Split
from tide.engine.base import EngineFacts, Generation
from tide.errors import Conflict, EngineError, EngineUnavailable
from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.eagle3 import Eagle3Evaluator, score_request
from tide.models.draft_files import load_draft
from tide.policies import CanaryPolicy
from tide.states.requests import request_row, write_segment
from tide.states.shards import write_shard

SINCE = 1000.0
POLICY = CanaryPolicy(max_requests=12, min_requests=6, wait_s=30, poll_s=1, answer_s=5, dead_requests=1000)


class Replica(FakeEngine):
    """A replica that captures."""

    def facts(self) -> EngineFacts:
        return super().facts().model_copy(update={"capture": {"sample_rate": 0.25}})


class Rig:
    """A good and a bad draft; answers follow the good one's proposals."""

    def __init__(self, folder: Path) -> None:
        self.drafts, self.spool = folder / "drafts", folder / "spool"
        self.bundle = tiny_bundle(folder / "bundle")
        self.good, self.bad = (tiny_draft(self.drafts, seed).name for seed in (0, 1))
        self.now, self.waits = 0.0, 0
        self.meanwhile: list[Callable[[], None]] = []
        self.spool.mkdir()
        self.folder = folder

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits += 1
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def serve(
        self,
        by: str,
        seeds: Sequence[int],
        *,
        split: Split = Split.TRAIN,
        lost: float = 0.0,
        states: dict[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        """These requests, served by a draft: their states in a shard, what the engine counted in a table."""
        rows, kept = [], []
        module = Eagle3Draft(load_draft(self.drafts / by), embedding_of(self.bundle))
        for seed in seeds:
            info = request_info(f"request-{seed}", split).model_copy(update={"draft": by})
            made = tiny_states(self.drafts / self.good, self.bundle, seed, info=info, **(states or {}))
            score = score_request(module, made, 3)
            counts = {"verify_steps": int(score.verify_steps), "proposed": int(score.proposed)}
            counts["accepted"] = max(0, round(float(score.accepted) - lost * float(score.proposed)))
            fixed = {"prompt_tokens": made.prompt_len, "sampling": "greedy", "temperature": 0.0, "draft": by}
            rows.append(request_row(info.request, SINCE + 1, SINCE + 2, **{**fixed, **counts, **columns}))
            kept.append(made)
        tiny_shard_at(self.spool / split.folder, kept, split)
        write_segment(
            self.spool / "requests", rows, target=TARGET, opened_at=SINCE, closed_at=SINCE + 3, dropped={}, excluded={}
        )

    def watch(
        self, candidate: str, incumbent: str | None, policy: CanaryPolicy = POLICY, replica: FakeEngine | None = None
    ) -> CanaryReport:
        self.replica = replica or Replica("r0", draft=candidate)
        watch = CanaryWatch(
            spool=self.spool,
            scratch=self.folder / "scratch",
            draft_dir=self.drafts,
            bundle=self.bundle,
            evaluator=Eagle3Evaluator,
            policy=policy,
            clock=lambda: self.now,
            wait=self.wait,
        )
        return watch(self.replica, candidate=candidate, incumbent=incumbent, since=SINCE, still_ours=self.still_ours)

    def still_ours(self) -> None:
        """The lease is held."""


def tiny_shard_at(folder: Path, states: list[Any], split: Split) -> None:
    """A shard closed after the candidate began to serve."""
    write_shard(folder, states, split=split, target=TARGET, opened_at=SINCE, closed_at=SINCE + 3)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_worse_candidate_is_found_on_the_very_requests_that_it_served(rig: Rig) -> None:
    rig.serve(rig.bad, range(12))
    report = rig.watch(rig.bad, rig.good, POLICY.model_copy(update={"max_requests": 50}))
    assert report.outcome == "regression"
    assert report.figures["requests"] == 12
    assert report.figures["candidate_walk"] == pytest.approx(report.figures["live"])


def test_the_incumbent_s_like_passes_with_as_many_requests_as_policy_asks_for(rig: Rig) -> None:
    rig.serve(rig.good, range(14))
    report = rig.watch(rig.good, rig.good)
    assert (report.outcome, report.figures["requests"], rig.waits) == ("passed", 12, 0)


def test_an_engine_that_loses_what_the_draft_accepts_is_named(rig: Rig) -> None:
    rig.serve(rig.good, range(30), lost=0.4)
    report = rig.watch(rig.good, None, POLICY.model_copy(update={"max_requests": 50}))
    assert report.outcome == "engine"


def test_held_out_conversations_speak_as_well_and_come_in_as_they_are_closed(rig: Rig) -> None:
    rig.serve(rig.good, range(6))
    rig.meanwhile = [lambda: rig.serve(rig.good, range(6, 12), split=Split.GATE)]
    report = rig.watch(rig.good, rig.good)
    assert (report.figures["requests"], rig.waits) == (12, 1)


@pytest.mark.parametrize(
    ("columns", "states"),
    [
        ({"draft": "mixed"}, {}),
        ({"draft": "f" * 64}, {}),
        ({"slice": PROBE_SLICE}, {}),
        ({"accepted": None, "proposed": None, "verify_steps": None}, {}),
        ({"cached_tokens": 4}, {}),
        ({"sampling": "unknown"}, {}),
        ({}, {"first_row": 4}),
    ],
    ids=["mixed", "another draft", "probe", "unmeasured", "cached prompt", "unknown sampling", "trimmed prompt"],
)
def test_requests_that_say_nothing_of_the_candidate_are_left_out(
    rig: Rig, columns: dict[str, Any], states: dict[str, Any]
) -> None:
    rig.serve(rig.bad, range(12), states=states, **columns)
    report = rig.watch(rig.bad, rig.good)
    assert (report.outcome, report.figures["requests"]) == ("passed", 0)


def test_a_short_cached_prefix_is_no_reason_to_leave_a_request_out(rig: Rig) -> None:
    rig.serve(rig.good, range(12), cached_tokens=3)
    assert rig.watch(rig.good, rig.good).figures["requests"] == 12


def test_requests_from_before_the_swap_are_not_the_candidate_s(rig: Rig) -> None:
    row = request_row("early", SINCE - 1, SINCE + 1, draft=rig.good, proposed=3, accepted=3, verify_steps=1)
    write_segment(
        rig.spool / "requests", [row], target=TARGET, opened_at=1.0, closed_at=SINCE + 1, dropped={}, excluded={}
    )
    assert rig.watch(rig.good, rig.good).figures["served"] == 0


def test_files_that_the_harvest_takes_meanwhile_are_still_compared(rig: Rig) -> None:
    rig.serve(rig.good, range(12))
    tables = rig.folder / "tables"
    shutil.move(rig.spool / "requests", tables)

    def harvested() -> None:
        shutil.rmtree(rig.spool / "train")
        shutil.move(tables, rig.spool / "requests")

    rig.meanwhile = [harvested]
    assert rig.watch(rig.good, rig.good).figures["requests"] == 12
    assert not (rig.folder / "scratch").exists()


def test_a_file_that_vanishes_between_its_manifest_and_its_rows_is_passed_over(rig: Rig) -> None:
    rig.serve(rig.good, range(3))
    for path in [*rig.spool.rglob("*.parquet"), *rig.spool.rglob("*.safetensors")]:
        path.unlink()
    rig.serve(rig.good, range(3, 15))
    assert rig.watch(rig.good, rig.good).figures["requests"] == 12


def test_a_broken_shard_is_named_and_the_others_are_compared(rig: Rig) -> None:
    rig.serve(rig.good, range(3))
    next(rig.spool.rglob("*.safetensors")).write_bytes(b"broken")
    rig.serve(rig.good, range(3, 15))
    report = rig.watch(rig.good, rig.good)
    assert report.outcome == "passed"
    assert any("truncated" in reason for reason in report.reasons)


def test_no_traffic_ends_with_the_time_and_says_so(rig: Rig) -> None:
    report = rig.watch(rig.good, rig.bad)
    assert (report.outcome, rig.now) == ("passed", 30.0)
    assert report.reasons[0].startswith("little traffic: 0 requests compared of 0 served")


def test_a_host_without_the_spool_says_so_and_waits_for_nothing(rig: Rig) -> None:
    rig.spool.rmdir()
    report = rig.watch(rig.good, rig.bad)
    assert (report.outcome, report.reasons[0], rig.waits) == ("passed", "nothing could be watched", 0)
    assert "set TIDE_SPOOL" in report.reasons[1]


def test_everything_is_captured_meanwhile_and_as_before_afterwards(rig: Rig) -> None:
    rig.watch(rig.good, rig.bad)
    assert rig.replica.capture_rates == [1.0, 0.25]


def test_the_rate_is_set_back_when_the_lease_is_lost_too(rig: Rig) -> None:
    def lost() -> None:
        raise Conflict("ended by another")

    rig.still_ours = lost  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        rig.watch(rig.good, rig.bad)
    assert rig.replica.capture_rates == [1.0, 0.25]


def test_a_replica_that_captures_nothing_is_not_waited_for_and_said_so(rig: Rig) -> None:
    class Blind(Replica):
        def set_capture_rate(self, rate: float) -> None:
            raise EngineError("r0: captures nothing")

    report = rig.watch(rig.good, rig.bad, replica=Blind("r0", draft=rig.good))
    assert (report.outcome, "captures nothing" in report.reasons[-1], rig.waits) == ("passed", True, 0)


# The replica's pulse


class Stopping(Replica):
    """Its scheduler answers nothing from its first probe on, for so many seconds."""

    def __init__(self, rig: Rig, draft: str, silent_s: float) -> None:
        super().__init__("r0", draft=draft)
        self.rig, self.until = rig, silent_s

    def probe(self, *, timeout_s: float) -> Generation:
        if self.rig.now < self.until:
            raise EngineUnavailable("r0: no answer")
        return super().probe(timeout_s=timeout_s)


def test_a_canary_that_generates_nothing_for_as_long_as_policy_waits_has_failed(rig: Rig) -> None:
    report = rig.watch(rig.good, rig.bad, replica=Stopping(rig, rig.good, 1e9))
    assert (report.outcome, rig.now) == ("failed", POLICY.answer_s)
    assert "has not generated for 5 s" in report.reasons[0]


def test_nothing_passes_while_the_canary_is_silent(rig: Rig) -> None:
    """The time of the watch is over before the patience with the replica is."""
    short = POLICY.model_copy(update={"wait_s": 3, "answer_s": 5.0})
    assert rig.watch(rig.good, rig.bad, short, Stopping(rig, rig.good, 1e9)).outcome == "failed"
    rig.now = 0.0
    assert rig.watch(rig.good, rig.bad, short, Stopping(rig, rig.good, 4.0)).outcome == "passed"
    assert rig.now == 4.0


def test_a_canary_that_stopped_since_its_last_answer_is_found_before_it_passes(rig: Rig) -> None:
    rig.serve(rig.good, range(6))
    replica = Replica("r0", draft=rig.good)

    def stops() -> None:
        rig.serve(rig.good, range(6, 12))
        replica.healthy = False

    rig.meanwhile = [stops]
    assert rig.watch(rig.good, rig.good, replica=replica).outcome == "failed"


def test_a_burst_of_long_prefills_is_no_failure(rig: Rig) -> None:
    assert rig.watch(rig.good, rig.bad, replica=Stopping(rig, rig.good, POLICY.answer_s - 1)).outcome == "passed"


def test_a_canary_that_serves_another_draft_by_now_has_failed(rig: Rig) -> None:
    report = rig.watch(rig.good, rig.bad, replica=Replica("r0", draft=rig.bad))
    assert (report.outcome, "by now" in report.reasons[0]) == ("failed", True)


def test_a_canary_that_drafts_no_more_has_failed(rig: Rig) -> None:
    class Plain(Replica):
        def probe(self, *, timeout_s: float) -> Generation:
            return super().probe(timeout_s=timeout_s).model_copy(update={"verify_steps": None})

    assert rig.watch(rig.good, rig.bad, replica=Plain("r0", draft=rig.good)).outcome == "failed"
