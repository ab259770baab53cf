"""The cost rule: what a retrain is expected to save, against what it costs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.signed import verdict_on
from tide.config import CostPolicy
from tide.domain import CostDecision, DriftReport, EngineProfile, Interval, ProfilePoint, Verdict
from tide.states.requests import REQUEST_SCHEMA, request_row
from tide.throughput import cost
from tide.throughput.cost import History, Traffic

A, B = "a" * 64, "b" * 64
TRAFFIC = Traffic(tokens_per_s=100.0, engine_s_per_token=0.005, proposed_per_step=3.0)
"""The engine is busy half of the time."""
POLICY = CostPolicy(training_cost=600.0, horizon=10_000.0, recovery=0.5, added=0.0)
HOPEFUL = POLICY.model_copy(update={"added": 0.05})
NONE = History()


def drift(rate: float | None = 0.4, expected: float | None = 0.5, **changes: Any) -> DriftReport:
    fields: dict[str, Any] = {
        "decision": "retrain",
        "cause": "drift",
        "reasons": ("cusum",),
        "figures": {"rate": rate, "expected_rate": expected},
        "incumbent": A,
        "states_commit": "5" * 64,
    }
    return DriftReport.model_validate(fields | changes)


def decide(report: DriftReport, policy: CostPolicy = POLICY, past: History = NONE, **options: Any) -> CostDecision:
    return cost.decide(report, policy, options.pop("traffic", TRAFFIC), past, steps=3, **options)


def test_the_gain_is_the_engine_time_saved_over_the_horizon() -> None:
    """Acceptance length 2.2 where 2.5 was; half of it back is 2.35; 100 x 10,000 x .005 x (1 - 2.2/2.35) = 319."""
    found = decide(drift())
    assert found.figures["length"] == pytest.approx(2.2)
    assert found.figures["expected_length"] == pytest.approx(2.35)
    assert found.figures["saved_s"] == pytest.approx(5000 * (1 - 2.2 / 2.35))
    assert found.figures["cost_s"] == 600.0
    assert found.decision == "does not pay"
    assert found.reasons[0].startswith("does not pay: 2.200 to 2.350 is expected, 1.068 times the speed")


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        ({"training_cost": 319.0}, "pays"),
        ({"training_cost": 320.0}, "does not pay"),
        ({"horizon": 18_801.0}, "pays"),
        ({"horizon": 18_799.0}, "does not pay"),
        ({"price_ratio": 0.53}, "pays"),
        ({"price_ratio": 0.54}, "does not pay"),
        ({"recovery": 1.0, "training_cost": 599.0}, "pays"),
    ],
)
def test_every_part_of_the_policy_may_tip_it(policy: dict[str, float], decision: str) -> None:
    assert decide(drift(), POLICY.model_copy(update=policy)).decision == decision


def test_a_gain_equal_to_the_cost_does_not_pay() -> None:
    saved = decide(drift()).figures["saved_s"]
    assert decide(drift(), POLICY.model_copy(update={"training_cost": saved})).decision == "does not pay"


def test_without_a_cost_the_rule_is_off_and_says_so() -> None:
    found = decide(drift(), CostPolicy(), traffic=None)
    assert (found.decision, found.reasons) == ("off", ("off: cost.training_cost is not set in the policy",))
    amended = cost.amend(drift(), found)
    assert (amended.decision, amended.cause) == ("retrain", "drift")
    assert amended.reasons == ("cusum", "cost: off: cost.training_cost is not set in the policy")


def test_a_first_draft_is_not_weighed() -> None:
    assert decide(drift(cause="bootstrap")).decision == "off"


@pytest.mark.parametrize("rate", [0.5, 0.6])
def test_inputs_that_moved_without_a_loss_promise_what_such_retrains_added(rate: float) -> None:
    report, length = drift(rate=rate, expected=0.5), 1 + 3 * rate
    assert decide(report, HOPEFUL).figures["expected_length"] == pytest.approx(length + 0.05)
    past = History(added=(0.0,) * 97)
    assert decide(report, HOPEFUL, past).figures["expected_length"] == pytest.approx(length + 0.0015)
    assert decide(report).figures["saved_s"] == 0.0


def test_what_is_added_comes_on_top_of_what_is_recovered() -> None:
    assert decide(drift(), HOPEFUL).figures["expected_length"] == pytest.approx(2.2 + 0.15 + 0.05)


@pytest.mark.parametrize(("rate", "traffic"), [(None, TRAFFIC), (0.4, None)])
def test_what_was_not_measured_promises_nothing(rate: float | None, traffic: Traffic | None) -> None:
    found = decide(drift(rate=rate), traffic=traffic)
    assert found.decision == "does not pay"
    assert "no acceptance was measured" in found.reasons[0]


def test_a_retrain_that_does_not_pay_becomes_a_watch_with_the_reason_first() -> None:
    amended = cost.amend(drift(), decide(drift()))
    assert (amended.decision, amended.cause) == ("watch", None)
    assert amended.reasons[0].startswith("cost: does not pay")
    assert amended.reasons[1:] == ("cusum",)


def test_a_retrain_that_pays_stays_one() -> None:
    amended = cost.amend(drift(), decide(drift(rate=0.1)))
    assert (amended.decision, amended.cause) == ("retrain", "drift")
    assert amended.reasons[-1].startswith("cost: pays")


def test_headroom_is_weighed_by_what_it_brought_before() -> None:
    report = drift(rate=0.5, cause="headroom")
    assert decide(report, HOPEFUL).figures["expected_length"] == pytest.approx(2.55)
    found = decide(report, HOPEFUL, History(added=(0.4, 0.5, 0.3)))
    assert found.figures["expected_length"] == pytest.approx(2.5 + (3 * 0.05 + 1.2) / 6)


def test_what_past_retrains_recovered_moves_the_prior() -> None:
    assert decide(drift(), past=History(recovered=(1.0, 1.0, 1.0))).figures["expected_length"] == pytest.approx(2.425)
    assert decide(drift(), past=History(recovered=(0.0,) * 97)).figures["expected_length"] == pytest.approx(2.2045)


# --- the engine ---

PROFILE = EngineProfile(
    points=(
        ProfilePoint(concurrency=1, plain_step_s=0.02, verify_step_s=0.024, draft_step_s=0.002),
        ProfilePoint(concurrency=4, plain_step_s=0.03, verify_step_s=0.048, draft_step_s=0.004),
    )
)


def test_a_profile_says_what_a_token_costs_and_the_reason_says_which_it_was() -> None:
    found = decide(drift(), profile=PROFILE, concurrency={1: 1.0, 4: 1.0})
    assert found.figures["engine_s_per_token"] == pytest.approx((0.030 + 0.060 / 4) / (2 * 2.2))
    assert "by the engine's profile" in found.reasons[0]
    assert "measured, prefill included" in decide(drift()).reasons[0]


@pytest.mark.parametrize("options", [{"profile": PROFILE}, {"concurrency": {1: 1.0}}, {"concurrency": {}}])
def test_half_a_profile_is_none(options: dict[str, Any]) -> None:
    assert decide(drift(), **options).figures["engine_s_per_token"] == 0.005


# --- traffic ---


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=REQUEST_SCHEMA)


def row(start: float, end: float, tokens: int = 50, draft: str = A, **columns: Any) -> dict[str, Any]:
    counted = {"proposed": 60, "accepted": 30, "verify_steps": 20} | columns
    return request_row(f"{start}-{end}", start, end, response_tokens=tokens, draft=draft, **counted)


def test_busy_time_is_that_in_which_any_request_runs() -> None:
    found = cost.traffic_of(table(row(0, 4), row(1, 2), row(3, 6), row(8, 10)), since=0.0, draft=A)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(200 / 10)
    assert found.engine_s_per_token == pytest.approx(8 / 200)
    assert found.proposed_per_step == 3.0


def test_requests_of_before_count_nothing_and_those_of_other_drafts_no_steps() -> None:
    other = row(4, 6, draft=B, proposed=0, verify_steps=10)
    unmeasured = row(6, 8, proposed=None, verify_steps=None)
    found = cost.traffic_of(table(row(0, 4), row(2, 6), other, unmeasured), since=4.0, draft=A)
    assert found is not None
    assert (found.tokens_per_s, found.proposed_per_step) == (25.0, 3.0)


@pytest.mark.parametrize(
    "rows", [[], [row(0, 4, draft=B)], [row(0, 4, tokens=0)], [row(0, 4, verify_steps=0)], [row(5, 5)]]
)
def test_requests_that_say_nothing_are_no_traffic(rows: list[dict[str, Any]]) -> None:
    assert cost.traffic_of(table(*rows), since=0.0, draft=A) is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 50)), min_size=1, max_size=20))
def test_an_engine_is_never_busier_than_there_is_time(times: list[tuple[float, float]]) -> None:
    rows = [row(start, start + length) for start, length in times]
    found = cost.traffic_of(table(*rows), since=-1.0, draft=A)
    assert found is not None
    assert 0 < found.tokens_per_s * found.engine_s_per_token <= 1 + 1e-9


# --- history ---


def judged(gain: float, incumbent: str = A, states: str = "5" * 64) -> Verdict:
    made = verdict_on(B, incumbent, "reject", states)
    difference = Interval(estimate=gain, low=gain - 0.1, high=gain + 0.1)
    return made.model_copy(update={"overall": made.overall.model_copy(update={"difference": difference})})


@pytest.mark.parametrize(
    ("gained", "recovered", "added"), [(0.15, 0.5, 0.0), (0.3, 1.0, 0.0), (0.9, 1.0, 0.6), (-0.2, 0.0, 0.0)]
)
def test_a_retrain_is_paired_with_the_verdict_on_what_came_of_it(gained: float, recovered: float, added: float) -> None:
    """.1 of the rate lost at 3 tokens a step is .3 of the acceptance length."""
    found = cost.history([drift()], [judged(gained)], 3.0)
    assert found.recovered == pytest.approx((recovered,))
    assert found.added == pytest.approx((added,))


@pytest.mark.parametrize("report", [drift(rate=0.5, cause="headroom"), drift(rate=0.5), drift(rate=0.6)])
def test_without_a_loss_there_is_nothing_to_recover(report: DriftReport) -> None:
    assert cost.history([report], [judged(0.15)], 3.0) == History(added=(0.15,))
    assert cost.history([report], [judged(-0.15)], 3.0) == History(added=(0.0,))


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (drift(decision="watch", cause=None), judged(0.15)),
        (drift(cause="bootstrap"), judged(0.15)),
        (drift(rate=None), judged(0.15)),
        (drift(), judged(0.15, incumbent=B)),
        (drift(), judged(0.15, states="6" * 64)),
    ],
)
def test_what_was_no_retrain_with_a_verdict_on_it_says_nothing(report: DriftReport, verdict: Verdict) -> None:
    assert cost.history([report], [verdict], 3.0) == NONE


def test_a_look_that_was_amended_counts_once_by_its_last_word() -> None:
    assert cost.history([drift(), drift(rate=0.2)], [judged(0.45)], 3.0).recovered == pytest.approx((0.5,))
    assert cost.history([drift(), drift(decision="watch", cause=None)], [judged(0.15)], 3.0) == NONE


# --- policy ---


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training_cost", 0),
        ("price_ratio", -1),
        ("horizon", 0),
        ("recovery", 1.5),
        ("recovery", 0),
        ("prior_weight", 0),
    ],
)
def test_a_policy_out_of_range_names_its_field(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        CostPolicy.model_validate({field: value})


def test_a_decision_can_be_stored() -> None:
    found = decide(drift())
    assert CostDecision.model_validate_json(found.to_json()) == found
