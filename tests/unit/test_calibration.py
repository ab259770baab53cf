from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tide.drift.calibration import alarm_threshold, cusum, mean_error

ALONE = np.array([f"c{i}" for i in range(400)])
PAIRED = np.array([f"c{i // 8}" for i in range(400)])


def threshold(
    losses: np.ndarray, conversations: np.ndarray = ALONE, *, horizon: int = 300, rate: float = 0.01
) -> float:
    return alarm_threshold(losses, conversations, horizon=horizon, rate=rate, seed=0)


@given(arrays(float, st.integers(1, 40), elements=st.floats(-10, 10)), st.floats(0, 30))
def test_the_path_is_pages_recursion(losses: np.ndarray, start: float) -> None:
    expected, level = [], start
    for loss in losses:
        level = max(0.0, level + loss)
        expected.append(level)
    assert cusum(losses, start) == pytest.approx(expected, abs=1e-9)


def test_streams_are_summed_one_by_one() -> None:
    both = np.array([[1.0, -3.0, 2.0], [-1.0, 1.0, 1.0]])
    assert cusum(both).tolist() == [cusum(both[0]).tolist(), cusum(both[1]).tolist()]


def test_fresh_streams_pass_the_threshold_as_seldom_as_was_asked() -> None:
    rng = np.random.default_rng(1)
    losses = rng.normal(0, 1, 400)
    limit = threshold(losses - losses.mean() - 0.25, rate=0.05)
    peaks = cusum(rng.normal(-0.25, 1, (2000, 300))).max(axis=1)
    assert 0.01 < (peaks > limit).mean() < 0.12


def test_conversations_that_stand_or_fall_together_need_a_higher_threshold() -> None:
    rng = np.random.default_rng(2)
    losses = np.repeat(rng.normal(0, 1, 50), 8) - 0.25
    assert threshold(losses, PAIRED) > 2 * threshold(losses, ALONE)


def test_a_longer_horizon_and_a_smaller_rate_ask_for_more() -> None:
    losses = np.random.default_rng(3).normal(-0.25, 1, 400)
    assert threshold(losses) < threshold(losses, horizon=3000)
    assert threshold(losses, rate=0.2) < threshold(losses)


def test_a_baseline_that_may_be_wrong_asks_for_more() -> None:
    losses = np.random.default_rng(3).normal(-0.25, 1, 400)
    exact, unsure = (alarm_threshold(losses, ALONE, horizon=300, rate=0.01, seed=0, error=e) for e in (0.0, 0.2))
    assert unsure > 1.5 * exact


def test_the_error_of_a_mean_counts_conversations_and_not_requests() -> None:
    rng = np.random.default_rng(4)
    single = rng.normal(0, 1, 400)
    assert mean_error(single, ALONE) == pytest.approx(1 / 20, rel=0.2)
    assert mean_error(np.repeat(single[:50], 8), PAIRED) == pytest.approx(1 / np.sqrt(50), rel=0.3)


def test_one_conversation_is_as_unsure_as_one_request() -> None:
    assert mean_error(np.array([1.0, 3.0]), np.array(["a", "a"])) == 1.0
