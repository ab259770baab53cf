from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.reports import CANDIDATE, INCUMBENT, TARGET, paired_reports, report, score
from tide.acceptance import baseline_without_draft
from tide.config import PromotionPolicy
from tide.domain import EvalReport, Verdict
from tide.errors import ContractMismatch, EvaluationError
from tide.promotion.families import attempt_alpha
from tide.promotion.rule import decide
from tide.promotion.verdict_text import to_markdown

POLICY = PromotionPolicy(resamples=600)


def verdict(
    candidate: EvalReport, incumbent: EvalReport, policy: PromotionPolicy = POLICY, attempt: int = 1
) -> Verdict:
    return decide(candidate, incumbent, policy, attempt=attempt, states_commit="commit", policy_digest="p" * 64)


def deciding(found: Verdict) -> str:
    return found.reasons[0].partition(":")[0]


def constant_gain(
    gain_steps: int, count: int = 40, slices: tuple[str, ...] = ("chat",)
) -> tuple[EvalReport, EvalReport]:
    """Requests so alike that bounds are within 1e-4 of the estimate: 120 tokens in 60 steps against 60 + gain_steps,
    by the thousand, and one step more or less.
    """
    names = [(f"{s}-{i}", s, i % 3 - 1) for s in slices for i in range(count)]
    ours = [score(name, 120_000, 60_000 + spread, s) for name, s, spread in names]
    theirs = [score(name, 120_000, 1000 * (60 + gain_steps), s) for name, s, _ in names]
    return report(CANDIDATE, ours), report(INCUMBENT, theirs)


# --- outcomes ---


def test_a_clear_gain_is_promoted() -> None:
    found = verdict(*paired_reports({"chat": 0.3, "code": 0.3}, 150))
    assert (found.outcome, deciding(found)) == ("promote", "min_gain")
    assert found.overall.difference.low > POLICY.min_gain
    assert found.more_requests == 0


def test_a_clear_loss_is_rejected() -> None:
    found = verdict(*paired_reports({"chat": -0.3}, 150))
    assert (found.outcome, deciding(found)) == ("reject", "min_gain")


def test_a_gain_that_few_requests_cannot_show_is_inconclusive_and_says_how_many_would() -> None:
    found = verdict(*paired_reports({"chat": 0.06}, 40))
    assert (found.outcome, deciding(found)) == ("inconclusive", "min_gain")
    assert 20 < found.more_requests < 2000
    assert f"{found.more_requests} more requests" in found.reasons[0]


def test_a_loss_that_few_requests_cannot_show_is_not_rejected() -> None:
    found = verdict(*paired_reports({"chat": -0.03}, 30, seed=2))
    assert found.overall.difference.estimate < POLICY.min_gain < found.overall.difference.high
    assert (found.outcome, deciding(found)) == ("inconclusive", "min_gain")


def test_the_number_of_further_requests_is_about_right() -> None:
    found = verdict(*paired_reports({"chat": 0.15}, 30, seed=3))
    assert found.outcome == "inconclusive"
    gain = found.overall.difference.estimate
    again = [verdict(*paired_reports({"chat": gain}, 30 + found.more_requests, seed=s)) for s in range(20)]
    assert sum(v.outcome == "promote" for v in again) >= 12


def test_a_literal_a_a_is_never_promoted() -> None:
    for seed in range(5):
        _, incumbent = paired_reports({"chat": 0.0, "code": 0.0}, 60, seed=seed)
        same = incumbent.model_copy(update={"draft": CANDIDATE})
        found = verdict(same, incumbent)
        assert (found.outcome, found.overall.difference.low, found.overall.difference.high) == ("reject", 0.0, 0.0)


def test_a_gain_in_total_does_not_buy_a_loss_in_one_slice() -> None:
    """Better on short contexts, worse on long ones: the total is up, the slice decides."""
    found = verdict(*paired_reports({"short": 0.7, "long": -0.3}, 200))
    assert found.overall.difference.low > POLICY.min_gain
    assert (found.outcome, deciding(found)) == ("reject", "slice_margin")
    assert "slice long" in found.reasons[0]


def test_a_slice_that_is_not_shown_to_be_unharmed_is_inconclusive_by_slice() -> None:
    first, second = paired_reports({"big": 0.4}, 300), paired_reports({"thin": 0.0}, 25, seed=1)
    ours, theirs = (report(a.draft, a.scores + b.scores) for a, b in zip(first, second, strict=True))
    found = verdict(ours, theirs)
    assert (found.outcome, deciding(found)) == ("inconclusive", "slice_margin")
    assert "slice thin" in found.reasons[0]
    assert "more of this slice" in found.reasons[0]
    assert found.more_requests > 300


def test_the_pooled_ratio_decides_where_the_mean_of_ratios_says_the_opposite() -> None:
    """Two tools disagree on which draft is better: 10 long answers gain, 14 short ones lose more each."""
    names = [(f"long-{i}", 1000, 500, 560 + i) for i in range(10)] + [(f"short-{i}", 10, 8, 4) for i in range(14)]
    ours = report(CANDIDATE, [score(n, tokens, steps) for n, tokens, steps, _ in names])
    theirs = report(INCUMBENT, [score(n, tokens, steps) for n, tokens, _, steps in names])

    def mean_of_ratios(found: EvalReport) -> float:
        return float(np.mean([s.tokens / s.verify_steps for s in found.scores]))

    assert mean_of_ratios(ours) < mean_of_ratios(theirs)
    assert ours.acceptance_length > theirs.acceptance_length
    assert verdict(ours, theirs).outcome == "promote"
    assert verdict(theirs, ours).outcome == "reject"


# --- each threshold, at its boundary ---


@pytest.mark.parametrize(("min_gain", "outcome"), [(0.0, "promote"), (0.09, "promote"), (0.1, "reject")])
def test_the_gain_must_exceed_min_gain(min_gain: float, outcome: str) -> None:
    ours, theirs = constant_gain(3)  # 120/60 - 120/63 = 0.0952
    assert verdict(ours, theirs, POLICY.model_copy(update={"min_gain": min_gain})).outcome == outcome


def test_a_gain_of_exactly_min_gain_is_not_enough() -> None:
    low = verdict(*constant_gain(20)).overall.difference.low
    assert low == pytest.approx(0.5, abs=1e-4)  # 2.0 - 1.5
    assert verdict(*constant_gain(20), POLICY.model_copy(update={"min_gain": low})).outcome == "inconclusive"
    below = float(np.nextafter(low, 0))
    assert verdict(*constant_gain(20), POLICY.model_copy(update={"min_gain": below})).outcome == "promote"


@pytest.mark.parametrize(
    ("margin", "outcome"), [(0.02, "reject"), (0.0337, "reject"), (0.0341, "promote"), (0.2, "promote")]
)
def test_a_slice_may_lose_up_to_the_margin(margin: float, outcome: str) -> None:
    good, bad = constant_gain(40, slices=("good",)), constant_gain(-1, slices=("bad",))  # bad: 2.0 - 120/59 = -0.0339
    ours, theirs = (report(a.draft, a.scores + b.scores) for a, b in zip(good, bad, strict=True))
    assert verdict(ours, theirs, POLICY.model_copy(update={"slice_margin": margin})).outcome == outcome


@pytest.mark.parametrize(("count", "outcome"), [(19, "inconclusive"), (20, "promote")])
def test_fewer_conversations_than_min_requests_never_decide(count: int, outcome: str) -> None:
    found = verdict(*constant_gain(10, count))
    assert found.outcome == outcome
    if outcome == "inconclusive":
        assert (deciding(found), found.more_requests) == ("min_requests", 1)


def test_many_requests_of_few_conversations_do_not_decide() -> None:
    names = [(f"r{i}", f"conversation-{i % 5}") for i in range(100)]
    ours = report(CANDIDATE, [score(n, 120, 60, conversation=c) for n, c in names])
    theirs = report(INCUMBENT, [score(n, 120, 80, conversation=c) for n, c in names])
    assert deciding(verdict(ours, theirs)) == "min_requests"


def test_slices_under_min_slice_requests_are_pooled_into_other() -> None:
    parts = [constant_gain(10, count, (name,)) for name, count in (("big", 20), ("a", 19), ("b", 19))]
    ours, theirs = (report(p[0].draft, sum((r.scores for r in p), start=())) for p in zip(*parts, strict=True))
    found = verdict(ours, theirs)
    assert {s.slice: s.requests for s in found.slices} == {"big": 20, "other": 38}


def test_strays_too_few_to_be_tested_are_named_and_do_not_block() -> None:
    parts = [paired_reports({"big": 0.4}, 60), paired_reports({"stray": -0.4}, 3)]
    ours, theirs = (report(p[0].draft, sum((r.scores for r in p), start=())) for p in zip(*parts, strict=True))
    found = verdict(ours, theirs)
    assert found.outcome == "promote"
    assert any(r.startswith("min_slice_requests: slice other is too small") for r in found.reasons)


@pytest.mark.parametrize(("attempt", "outcome"), [(10, "promote"), (11, "inconclusive")])
def test_a_gate_generation_gives_max_verdicts_and_no_more(attempt: int, outcome: str) -> None:
    found = verdict(*constant_gain(10), attempt=attempt)
    assert found.outcome == outcome
    if outcome == "inconclusive":
        assert deciding(found) == "max_verdicts"


def test_a_later_attempt_asks_for_more_and_the_verdict_records_it() -> None:
    reports = paired_reports({"chat": 0.15}, 60, seed=1)
    first, ninth = verdict(*reports), verdict(*reports, attempt=9)
    assert first.outcome == "promote"
    assert ninth.outcome == "inconclusive"
    assert (ninth.attempt, ninth.alpha) == (9, attempt_alpha(POLICY.alpha, 9))


def test_a_stricter_alpha_is_used() -> None:
    reports = paired_reports({"chat": 0.15}, 60, seed=1)
    assert verdict(*reports).outcome == "promote"
    assert verdict(*reports, POLICY.model_copy(update={"alpha": 0.001})).outcome == "inconclusive"


# --- the first draft ---


def test_a_first_draft_is_compared_with_plain_decoding() -> None:
    ours = report(CANDIDATE, [score(f"r{i}", 61, 40 + i % 5) for i in range(60)])
    found = verdict(ours, baseline_without_draft(ours))
    assert (found.outcome, found.incumbent) == ("promote", "none")
    assert found.overall.incumbent == pytest.approx(61 / 60)


def test_a_first_draft_that_is_never_right_is_rejected() -> None:
    ours = report(CANDIDATE, [score(f"r{i}", 16, 15) for i in range(60)])
    assert verdict(ours, baseline_without_draft(ours)).outcome == "reject"


# --- what cannot be compared ---


@pytest.mark.parametrize(
    "changes",
    [{"definition": "mean/1"}, {"sampling": "sampled"}, {"steps": 5}, {"topk": 4}, {"states_commit": "older"}],
    ids=lambda changes: next(iter(changes)),
)
def test_reports_made_otherwise_are_refused_by_part(changes: dict[str, object]) -> None:
    ours, theirs = constant_gain(10)
    with pytest.raises(EvaluationError, match=next(iter(changes))):
        verdict(ours, theirs.model_copy(update=changes))


def test_two_reports_of_an_unknown_definition_are_refused() -> None:
    ours, theirs = (r.model_copy(update={"definition": "mean/1"}) for r in constant_gain(10))
    with pytest.raises(EvaluationError, match="mean/1"):
        verdict(ours, theirs)


def test_reports_of_other_states_than_the_verdict_binds_to_are_refused() -> None:
    ours, theirs = (r.model_copy(update={"states_commit": "older"}) for r in constant_gain(10))
    with pytest.raises(EvaluationError, match="older"):
        verdict(ours, theirs)


def test_reports_of_two_targets_are_refused_by_part() -> None:
    ours, theirs = constant_gain(10)
    other = TARGET.model_copy(update={"weights": "9" * 64})
    with pytest.raises(ContractMismatch, match="weights"):
        verdict(ours.model_copy(update={"target": other}), theirs)


def test_other_request_sets_are_refused() -> None:
    ours, theirs = constant_gain(10)
    with pytest.raises(EvaluationError, match="chat-7"):
        verdict(ours, theirs.model_copy(update={"scores": tuple(s for s in theirs.scores if s.request != "chat-7")}))


@pytest.mark.parametrize("field", ["conversation", "slice", "tokens"])
def test_one_request_must_be_the_same_in_both(field: str) -> None:
    ours, theirs = constant_gain(10)
    changed = theirs.scores[3].model_copy(update={field: 7 if field == "tokens" else "other"})
    with pytest.raises(EvaluationError, match=f"chat-3: {field}"):
        verdict(ours, theirs.model_copy(update={"scores": (*theirs.scores[:3], changed, *theirs.scores[4:])}))


def test_a_request_measured_on_one_side_only_is_refused() -> None:
    ours, theirs = constant_gain(10)
    unmeasured = theirs.scores[3].model_copy(update={"verify_steps": 0})
    with pytest.raises(EvaluationError, match="chat-3: measured in one report only"):
        verdict(ours, theirs.model_copy(update={"scores": (*theirs.scores[:3], unmeasured, *theirs.scores[4:])}))


def test_a_request_that_stands_twice_is_refused() -> None:
    ours, theirs = constant_gain(10)
    doubled = [r.model_copy(update={"scores": (*r.scores, r.scores[0])}) for r in (ours, theirs)]
    with pytest.raises(EvaluationError, match="twice"):
        verdict(*doubled)


def test_empty_reports_are_refused() -> None:
    with pytest.raises(EvaluationError, match="no request"):
        verdict(report(CANDIDATE, []), report(INCUMBENT, []))


def test_reports_in_which_nothing_was_verified_are_refused() -> None:
    scores = [score("a", 1, 0)]
    with pytest.raises(EvaluationError, match="nothing was measured"):
        verdict(report(CANDIDATE, scores), report(INCUMBENT, scores))


def test_an_attempt_below_one_is_refused() -> None:
    with pytest.raises(EvaluationError, match="attempt"):
        verdict(*constant_gain(10), attempt=0)


# --- properties ---

STEPS = st.lists(st.tuples(st.integers(30, 120), st.integers(30, 120)), min_size=25, max_size=60)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_bounds_surround_the_estimate_and_the_verdict_can_be_stored(steps: list[tuple[int, int]]) -> None:
    ours = report(CANDIDATE, [score(f"r{i}", 120, a) for i, (a, _) in enumerate(steps)])
    theirs = report(INCUMBENT, [score(f"r{i}", 120, b) for i, (_, b) in enumerate(steps)])
    found = verdict(ours, theirs)
    for item in (found.overall, *found.slices):
        assert item.difference.low <= item.difference.estimate <= item.difference.high
        assert item.difference.estimate == pytest.approx(item.candidate - item.incumbent)
    assert Verdict.model_validate_json(found.to_json()) == found


def test_false_promotions_are_as_rare_as_alpha_says() -> None:
    """150 candidates whose true gain is exactly min_gain, two slices: at most 4% may pass."""
    truth = np.mean([gain_of(*paired_reports({"a": 0.0, "b": 0.1}, 3000, seed=s)) for s in range(2)])
    policy = POLICY.model_copy(update={"min_gain": float(truth), "slice_margin": 3.0, "resamples": 300})
    found = [verdict(*paired_reports({"a": 0.0, "b": 0.1}, 40, seed=s), policy).outcome for s in range(150)]
    assert found.count("promote") <= 150 * 0.04


def gain_of(ours: EvalReport, theirs: EvalReport) -> float:
    return ours.acceptance_length - theirs.acceptance_length


def test_ten_thousand_requests_in_twelve_slices_are_decided_in_time() -> None:
    reports = paired_reports({f"slice-{i}": 0.1 for i in range(12)}, 10_000 // 12)
    started = time.process_time()
    verdict(*reports, PromotionPolicy())
    assert time.process_time() - started < 2.0  # one second on an idle machine


def test_the_verdict_reads_as_a_table() -> None:
    found = verdict(*paired_reports({"chat": 0.3, "code": 0.3}, 60))
    text = to_markdown(found)
    assert text.startswith("## promote")
    assert "| code | 60 |" in text
    assert all(reason in text for reason in found.reasons)
    assert "four times in five" in text
