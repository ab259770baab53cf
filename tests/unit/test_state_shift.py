from __future__ import annotations

import numpy as np
import pytest

from tests.support.traffic_stats import join, make_stats
from tide.drift.state_shift import MAX_ROWS, States, _estimates, reference_states, state_shift


@pytest.fixture(scope="module")
def reference() -> States:
    found = reference_states(make_stats(200, seed=1), seed=0)
    assert found is not None
    return found


def test_states_that_moved_are_found_and_measured(reference: States) -> None:
    found = state_shift(reference, make_stats(100, seed=2, state_shift=4.0), min_requests=50)
    assert found is not None
    assert found.significant
    assert found.distance > 0.2


def test_draws_of_the_same_states_are_hardly_ever_significant(reference: States) -> None:
    found = [state_shift(reference, make_stats(80, seed=s), min_requests=50) for s in range(10, 50)]
    assert sum(shift.significant for shift in found if shift) <= 2
    assert max(shift.distance for shift in found if shift) < 0.1


def test_states_of_one_conversation_are_not_taken_for_independent() -> None:
    """Eight requests a conversation, nearly equal among themselves: by request every draw would look like a shift."""

    def stats(seed: int) -> object:
        found = make_stats(160, seed=seed, turns=8)
        found.pooled[:] = np.repeat(found.pooled[::8], 8, axis=0) + found.pooled / 10
        return found

    kept = reference_states(stats(1), seed=0)  # type: ignore[arg-type]
    assert kept is not None
    flags = [state_shift(kept, stats(s), min_requests=50) for s in range(20, 50)]  # type: ignore[arg-type]
    assert sum(shift.significant for shift in flags if shift) <= 2


def test_a_change_of_the_mix_between_known_slices_is_no_shift() -> None:
    near, far = make_stats(100, seed=1, slices=["near"]), make_stats(100, seed=2, slices=["far"], state_shift=6.0)
    kept = reference_states(join(near, far), seed=0)
    assert kept is not None
    found = state_shift(kept, make_stats(100, seed=3, slices=["far"], state_shift=6.0), min_requests=50)
    moved = state_shift(kept, make_stats(100, seed=3, slices=["near"], state_shift=6.0), min_requests=50)
    new = state_shift(kept, make_stats(100, seed=3, slices=["new"], state_shift=6.0), min_requests=50)
    assert found is not None
    assert moved is not None
    assert new is not None
    assert (found.significant, moved.significant, new.significant) == (False, True, True)
    assert moved.distance > 5 * found.distance


def test_time_and_memory_are_bounded_whatever_the_sizes() -> None:
    kept = reference_states(make_stats(2000, seed=1), seed=0)
    assert kept is not None
    assert len(kept.rows) == len(kept.slices) == MAX_ROWS
    assert state_shift(kept, make_stats(3000, seed=2), min_requests=50) is not None


def test_requests_without_a_pooled_state_say_nothing(reference: States) -> None:
    window = make_stats(100, seed=2, state_shift=4.0)
    window.pooled[:60] = np.nan
    window.pooled[60, 3] = np.inf
    assert state_shift(reference, window, min_requests=40) is None
    found = state_shift(reference, window, min_requests=39)
    assert found is not None
    assert found.significant


@pytest.mark.parametrize("count", [0, 3])
def test_a_reference_of_a_few_states_is_none(count: int) -> None:
    assert reference_states(make_stats(count), seed=0) is None


def test_equal_states_are_no_reference() -> None:
    stats = make_stats(50)
    stats.pooled[:] = 1.0
    assert reference_states(stats, seed=0) is None


def test_the_estimate_is_the_unbiased_one_written_out() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 1, (7, 3)), rng.normal(1, 1, (9, 3))

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.exp(-((a - b) ** 2).sum() / 2))

    within_x = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    within_y = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    across = np.mean([k(a, b) for a in x for b in y])
    both = np.concatenate([x, y])
    kernel = np.array([[k(a, b) for b in both] for a in both])
    sides = np.array([[1.0] * 7 + [0.0] * 9])
    assert _estimates(kernel, sides)[0] == pytest.approx(within_x + within_y - 2 * across)
