from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.reports import TARGET
from tests.support.traffic_stats import draft_model, make_stats
from tide.config import CapturePolicy, Policy
from tide.domain import DriftReport
from tide.states.capture_rate import after, rows_per_s, wanted_rate

POLICY = CapturePolicy(floor_rate=0.02, gather_time_s=1000.0)


def rate(policy: CapturePolicy = POLICY, **changes: Any) -> float:
    given: dict[str, Any] = {"gather": True, "needed_rows": 10_000, "available_rows": 0, "rows_per_s": 100.0}
    return wanted_rate(policy, row_bytes=1000, **(given | changes))


def test_while_nothing_is_asked_for_the_floor_is_captured() -> None:
    assert rate(gather=False) == 0.02


def test_what_is_missing_is_gathered_in_the_time_the_policy_gives() -> None:
    assert rate() == pytest.approx(0.1)
    assert rate(available_rows=5_000) == pytest.approx(0.05)
    assert rate(POLICY.model_copy(update={"gather_time_s": 500.0})) == pytest.approx(0.2)


@pytest.mark.parametrize("available", [10_000, 50_000])
def test_enough_rows_bring_the_rate_back_to_the_floor(available: int) -> None:
    assert rate(available_rows=available) == 0.02


def test_little_traffic_is_captured_whole_and_no_more_than_whole() -> None:
    assert rate(rows_per_s=1.0) == 1.0
    assert rate(rows_per_s=0.0) == 1.0


def test_the_byte_budget_is_kept_even_below_the_floor() -> None:
    budget = POLICY.model_copy(update={"byte_budget_per_s": 1000.0})
    assert rate(budget) == pytest.approx(0.01)
    assert rate(budget, gather=False) == pytest.approx(0.01)


@given(st.booleans(), st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e6), st.floats(0.1, 1e9))
def test_a_rate_is_a_share_and_within_the_budget(
    gather: bool, needed: int, available: int, rows: float, budget: float
) -> None:
    policy = POLICY.model_copy(update={"byte_budget_per_s": budget})
    found = rate(policy, gather=gather, needed_rows=needed, available_rows=available, rows_per_s=rows)
    assert 0 <= found <= 1
    assert found * rows * 1000 <= budget * (1 + 1e-9)


@pytest.mark.parametrize(("decision", "expected"), [("none", 0.01), ("watch", 1.0), ("retrain", 1.0)])
def test_the_drift_gate_raises_the_rate(decision: Any, expected: float) -> None:
    report = DriftReport(decision=decision, reasons=(), figures={}, incumbent="d", states_commit="s")
    assert after(report, make_stats(0), Policy(), draft_model(), 0, TARGET) == expected


def test_without_a_draft_of_ours_states_are_gathered_whatever_the_gate_says() -> None:
    report = DriftReport(decision="none", reasons=(), figures={}, incumbent="none", states_commit="s")
    assert after(report, make_stats(0), Policy(), None, 0, TARGET) == 1.0


def test_traffic_is_counted_in_the_rows_that_would_be_kept() -> None:
    stats = make_stats(11)
    stats.response_tokens[:], stats.prompt_tokens[:] = 50.0, 900.0
    assert rows_per_s(stats, 64) == pytest.approx(11 * 114 / 10)
    assert rows_per_s(stats.take(stats.finished_at < 2), 64) == 0.0
