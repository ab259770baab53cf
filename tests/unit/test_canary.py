"""The canary's test: its error rate whatever one looks at, its power, and the rule around it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tide.canary.rule import Compared, crossed, decide, evidence
from tide.domain import CanaryReport
from tide.policies import CanaryPolicy

POLICY = CanaryPolicy(max_requests=100, min_requests=30, wait_s=60, margin=0.03, alpha=0.04, engine_alpha=0.01)


def decided(pairs: list[Compared], elapsed_s: float = 1.0, policy: CanaryPolicy = POLICY) -> CanaryReport | None:
    return decide(pairs, [pair.live for pair in pairs], policy, elapsed_s=elapsed_s)


def pairs(count: int, live: float, incumbent: float | None, candidate: float | None = None) -> list[Compared]:
    return [Compared(live, live if candidate is None else candidate, incumbent)] * count


# The test


@pytest.mark.parametrize("margin", [0.03, 0.2])
@pytest.mark.parametrize("high", [1.0, 0.4])
def test_wealth_is_a_fair_game_at_the_edge_of_the_hypothesis(margin: float, high: float) -> None:
    """Every path of ten losses of -1 or ``high`` with the mean at the margin: the mean wealth is 1 at every length."""
    chance = (margin + 1) / (high + 1)
    for length in (1, 4, 10):
        total = 0.0
        for path in itertools.product([high, -1.0], repeat=length):
            ups = path.count(high)
            total += chance**ups * (1 - chance) ** (length - ups) * evidence(path, margin)[-1]
        assert total == pytest.approx(1.0)


@given(st.lists(st.floats(-1, 1), max_size=60), st.floats(0.001, 0.9))
def test_wealth_never_ends(losses: list[float], margin: float) -> None:
    found = evidence(losses, margin)
    assert len(found) == len(losses)
    assert all(w > 0 and math.isfinite(w) for w in found)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(-1, 1))
def test_no_bet_looks_at_the_loss_it_is_made_on(losses: list[float], other: float) -> None:
    before = evidence(losses[:-1], 0.03)
    assert evidence(losses, 0.03)[:-1] == before == evidence([*losses[:-1], other], 0.03)[:-1]


def test_an_equal_draft_that_is_looked_at_after_every_request_is_hardly_ever_called_worse() -> None:
    """Also one that is worse by the whole margin, which is the edge of the hypothesis, only as often as alpha says."""
    rng = np.random.default_rng(0)
    wrong = {0.0: 0, 0.03: 0}
    trials = 600
    for mean in wrong:
        for _ in range(trials):
            losses = np.clip(rng.normal(mean, 0.12, 200), -1, 1)
            wrong[mean] += crossed(evidence(losses.tolist(), 0.03), 0.04) is not None
    assert wrong[0.0] <= 0.02 * trials
    assert wrong[0.03] <= 0.06 * trials  # 0.04 and two standard errors


def test_a_loss_of_fifteen_points_is_found_within_a_few_dozen_requests() -> None:
    rng = np.random.default_rng(1)
    needed = []
    for _ in range(400):
        losses = np.clip(rng.normal(0.15, 0.12, 300), -1, 1)
        found = crossed(evidence(losses.tolist(), 0.03), 0.04)
        assert found is not None
        needed.append(found)
    assert np.median(needed) <= 36
    assert np.quantile(needed, 0.95) <= 60


# The rule


def test_a_candidate_far_below_the_incumbent_is_a_regression_with_its_figures() -> None:
    report = decided(pairs(60, live=0.1, incumbent=0.4))
    assert report is not None
    assert report.outcome == "regression"
    assert "0.100" in report.reasons[0]
    assert "0.400" in report.reasons[0]
    assert report.figures["regression_evidence"] is not None
    assert report.figures["regression_evidence"] >= 1 / POLICY.alpha


def test_a_candidate_below_its_own_walk_is_an_engine_fault_and_not_the_draft_s() -> None:
    report = decided(pairs(60, live=0.1, incumbent=0.3, candidate=0.4))
    assert report is not None
    assert (report.outcome, "the engine loses it" in report.reasons[0]) == ("engine", True)


def test_without_an_incumbent_only_the_engine_is_judged() -> None:
    assert decided(pairs(60, live=0.05, incumbent=None)) is None
    faulty = decided(pairs(60, live=0.05, incumbent=None, candidate=0.4))
    assert faulty is not None
    assert faulty.outcome == "engine"


def test_a_better_or_equal_candidate_is_watched_until_there_are_enough_requests() -> None:
    for incumbent in (0.4, 0.3):
        assert decided(pairs(99, live=0.4, incumbent=incumbent)) is None
        report = decided(pairs(100, live=0.4, incumbent=incumbent))
        assert report is not None
        assert (report.outcome, report.reasons) == ("passed", ("no regression in 100 requests",))


def test_a_loss_within_the_margin_is_no_regression_and_beyond_it_is() -> None:
    wide = POLICY.model_copy(update={"max_requests": 1000})
    assert decided(pairs(900, live=0.37, incumbent=0.4), policy=wide) is None
    beyond = decided(pairs(900, live=0.37, incumbent=0.4), policy=wide.model_copy(update={"margin": 0.005}))
    assert beyond is not None
    assert beyond.outcome == "regression"


def test_a_smaller_alpha_takes_longer() -> None:
    first = {a: crossed(evidence([0.15] * 200, 0.03), a) for a in (0.1, 0.04, 0.001)}
    assert first[0.1] is not None
    assert first[0.04] is not None
    assert first[0.001] is not None
    assert first[0.1] < first[0.04] < first[0.001]


@pytest.mark.parametrize(
    ("compared", "called"), [(29, "little traffic: 29"), (30, "no regression: 30"), (0, "little traffic: 0")]
)
def test_when_the_time_is_over_the_promotion_goes_on_and_the_report_says_how_much_was_seen(
    compared: int, called: str
) -> None:
    some = pairs(compared, live=0.4, incumbent=0.4)
    assert decided(some, elapsed_s=59.99) is None
    report = decided(some, elapsed_s=60.0)
    assert report is not None
    assert report.outcome == "passed"
    assert report.reasons[0].startswith(called)


def test_nothing_accepted_in_fifty_requests_is_dead_whether_their_states_were_seen_or_not() -> None:
    assert decide([], [0.0] * 49, POLICY, elapsed_s=1) is None
    report = decide([], [0.0] * 50, POLICY, elapsed_s=1)
    assert report is not None
    assert (report.outcome, "50 requests" in report.reasons[0]) == ("dead", True)
    assert decide([], [0.0] * 99 + [0.01], POLICY, elapsed_s=1) is None
    assert decide([], [0.0] * 50, POLICY.model_copy(update={"dead_requests": 51}), elapsed_s=1) is None


def test_a_lease_must_outlast_the_watch() -> None:
    with pytest.raises(ValidationError, match="lease_s must exceed"):
        CanaryPolicy(wait_s=100, answer_s=20, lease_s=120)
    assert CanaryPolicy(wait_s=100, answer_s=20, lease_s=121).lease_s == 121
