"""What must hold of a verdict whatever the data: symmetry, order, duplication, and data that say nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.reports import CANDIDATE, INCUMBENT, report, score
from tide.config import PromotionPolicy
from tide.domain import EvalReport, Interval, RequestScore, Verdict
from tide.errors import EvaluationError
from tide.promotion.rule import decide

POLICY = PromotionPolicy(resamples=300, min_slice_requests=10)
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Steps = list[tuple[int, int]]

STEPS = st.lists(st.tuples(st.integers(30, 120), st.integers(30, 120)), min_size=20, max_size=60)


def verdict(candidate: EvalReport, incumbent: EvalReport) -> Verdict:
    return decide(candidate, incumbent, POLICY, attempt=1, states_commit="commit", policy_digest="p" * 64)


def reports(steps: Steps, copies: int = 1) -> tuple[EvalReport, EvalReport]:
    """Two slices in turn, two requests a conversation now and then; ``copies`` of all under names of their own."""
    ours, theirs = [], []
    for copy in range(copies):
        for index, (a, b) in enumerate(steps):
            names = (f"r{copy}-{index}", ("chat", "code")[index % 2], f"c{copy}-{index - (index % 7 == 6)}")
            made = [score(names[0], 120, n, names[1], names[2]) for n in (a, b)]
            prompt = {"prompt_tokens": 500 if index % 3 else 3000}
            ours.append(made[0].model_copy(update=prompt))
            theirs.append(made[1].model_copy(update=prompt))
    return report(CANDIDATE, ours), report(INCUMBENT, theirs)


def intervals(found: Verdict) -> list[tuple[str, Interval]]:
    return [(s.slice, s.difference) for s in (found.overall, *found.slices)]


@FEW
@given(STEPS)
def test_exchanging_the_drafts_negates_every_interval_and_never_promotes_both(steps: Steps) -> None:
    ours, theirs = reports(steps)
    there, back = verdict(ours, theirs), verdict(theirs, ours)
    for (name, a), (same, b) in zip(intervals(there), intervals(back), strict=True):
        assert name == same
        assert (a.low, a.estimate, a.high) == pytest.approx((-b.high, -b.estimate, -b.low), abs=1e-9)
    assert [there.outcome, back.outcome] != ["promote", "promote"]


@FEW
@given(STEPS, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter_at_all(steps: Steps, order: random.Random) -> None:
    pair = reports(steps)
    mixed = [r.model_copy(update={"scores": tuple(order.sample(r.scores, len(r.scores)))}) for r in pair]
    assert verdict(*mixed) == verdict(*pair)


@FEW
@given(STEPS, st.integers(-25, 25))
def test_the_same_evidence_twice_never_turns_a_promotion_into_a_rejection(steps: Steps, better: int) -> None:
    """Every conversation once more under another name: what was shown is shown more clearly.

    Slices are large enough here to be tested either way; one that is not may be, with twice the requests.
    """
    steps = [(max(a - better, 30), b) for a, b in steps]
    once, twice = verdict(*reports(steps)), verdict(*reports(steps, copies=2))
    assert twice.overall.difference.estimate == pytest.approx(once.overall.difference.estimate)
    tested = {s.slice for s in once.slices}
    if once.outcome == "promote" and {s.slice for s in twice.slices} == tested:
        assert twice.outcome != "reject"


@FEW
@given(st.lists(st.integers(30, 120), min_size=1, max_size=60))
def test_a_draft_is_never_promoted_over_itself(steps: list[int]) -> None:
    ours, theirs = reports([(n, n) for n in steps])
    assert verdict(ours, theirs).outcome != "promote"


@FEW
@given(st.integers(30, 120), st.integers(30, 120), st.integers(1, 60))
def test_requests_that_all_say_the_same_are_never_enough(a: int, b: int, count: int) -> None:
    ours = [score(f"r{i}", 120, a) for i in range(count)]
    theirs = [score(f"r{i}", 120, b) for i in range(count)]
    assert verdict(report(CANDIDATE, ours), report(INCUMBENT, theirs)).outcome != "promote"


def test_a_gain_without_any_spread_is_named() -> None:
    found = verdict(
        *(report(d, [score(f"r{i}", 120, n) for i in range(40)]) for d, n in ((CANDIDATE, 60), (INCUMBENT, 80)))
    )
    assert (found.outcome, found.reasons[0].partition(":")[0]) == ("inconclusive", "no_spread")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda s: [], "no request"),
        (lambda s: [*s, s[0]], "twice"),
        (lambda s: [x.model_copy(update={"verify_steps": 0}) for x in s], "nothing was measured"),
    ],
)
def test_data_that_say_nothing_are_an_error(
    spoil: Callable[[list[RequestScore]], list[RequestScore]], error: str
) -> None:
    pair = reports([(40, 60 + i) for i in range(30)])
    with pytest.raises(EvaluationError, match=error):
        verdict(*(r.model_copy(update={"scores": tuple(spoil(list(r.scores)))}) for r in pair))


@pytest.mark.parametrize("field", ["tokens", "verify_steps", "accepted", "prompt_tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1])
def test_a_score_is_a_count(field: str, value: float) -> None:
    good = score("r", 120, 60).model_dump()
    with pytest.raises(ValidationError, match=field):
        RequestScore.model_validate(good | {field: value})


@pytest.mark.parametrize("sampling", ["sampled", "unknown"])
def test_another_sampling_regime_is_never_compared(sampling: str) -> None:
    ours, theirs = reports([(40, 60 + i) for i in range(30)])
    with pytest.raises(EvaluationError, match=f"differ in sampling: candidate 'greedy', incumbent '{sampling}'"):
        verdict(ours, theirs.model_copy(update={"sampling": sampling}))


def test_what_more_is_needed_is_said_of_each_slice_that_waits() -> None:
    first, second = reports([(50 + i % 5, 60) for i in range(40)]), [(40, 60), (90, 60)] * 12
    thin = [[score(f"t{i}", 120, pair[side], "thin") for i, pair in enumerate(second)] for side in (0, 1)]
    found = verdict(*(report(r.draft, r.scores + tuple(t)) for r, t in zip(first, thin, strict=True)))
    waiting = {s.slice: s.more_requests for s in found.slices}
    assert found.outcome == "inconclusive"
    assert waiting["thin"] > 0
    assert waiting["chat"] == waiting["code"] == 0
    assert f"{waiting['thin']} more of this slice" in " ".join(found.reasons)
    assert found.more_requests >= waiting["thin"]
    assert all(s.detectable_effect is not None and s.detectable_effect > 0 for s in found.slices)
