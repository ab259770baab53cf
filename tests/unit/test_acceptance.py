from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.reports import INCUMBENT, report, score
from tide.acceptance import (
    MAX_CLUSTERS,
    PairedDifference,
    Replay,
    Walk,
    baseline_without_draft,
    expected_length,
    paired_difference,
)


def walk(values: list[int], depth: int = 5) -> Walk:
    """A request whose anchors have these leading right proposals, cut to the tokens that are left."""
    replay = Replay(len(values) + 1, depth)
    while replay.left:
        replay.step(min(values[replay.position], replay.left, depth))
    return replay.counted()


def compare(sums: object, names: object = None, **changes: float) -> PairedDifference:
    values = np.asarray(sums, dtype=np.float64)
    conversations = np.array([str(i) for i in range(len(values))] if names is None else names)
    options = {"alpha": 0.05, "resamples": 500, "seed": 0, "largest": 4.0} | changes
    return paired_difference(values, conversations, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        ([], (1, 0, 0)),
        ([0], (2, 1, 0)),
        ([1], (2, 1, 1)),
        ([0, 0, 0], (4, 3, 0)),
        ([3, 2, 1], (4, 1, 3)),
        ([1, 3, 0, 0, 1, 1], (7, 4, 2)),
        ([2, 9, 9, 2, 9, 1], (7, 2, 4)),
    ],
)
def test_a_walk_jumps_over_what_was_accepted_and_the_bonus_token(
    correct: list[int], expected: tuple[int, int, int]
) -> None:
    found = walk(correct)
    assert (found.tokens, found.verify_steps, found.accepted) == expected


@given(st.lists(st.integers(0, 5), max_size=60))
def test_a_walk_covers_every_token_once(correct: list[int]) -> None:
    found = walk(correct)
    assert found.tokens == len(correct) + 1
    # Each step gives its accepted tokens and a bonus one; only behind the answer's end is the bonus not emitted.
    assert found.tokens - 1 <= found.verify_steps + found.accepted <= found.tokens


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_draft_that_is_right_nowhere_takes_a_step_for_each_token(correct: list[int]) -> None:
    assert walk([0] * len(correct)).verify_steps == len(correct)
    assert walk(correct).verify_steps <= len(correct)


def test_depths_count_the_steps_that_came_so_far() -> None:
    assert walk([3, 0, 0, 0, 1, 0, 0], depth=3).accepted_at == (2, 1, 1)


def test_chances_of_one_and_nought_give_what_was_counted() -> None:
    counted, expected = Replay(9, 3), Replay(9, 3)
    for right in (2, 0, 3, 0):
        counted.step(right)
        expected.step(right, [1.0] * right + [0.0] * (3 - right))
    assert expected.expected() == counted.counted()


def test_an_answer_of_one_token_has_no_verify_step_to_expect_anything_of() -> None:
    assert Replay(1, 3).expected() == Walk(1, 0, (0.0, 0.0, 0.0))


VOCABULARY, DEPTH, ANSWER = 5, 3, 40
CHAIN = np.random.default_rng(11).dirichlet(np.full(VOCABULARY, 0.5), VOCABULARY)
"""[token, next token] what the toy target draws from."""
GUESS = np.array([CHAIN[0].argsort()[-2], *CHAIN[1:].argmax(axis=1)])
"""[token] what the toy draft proposes behind it; for one token only the second best."""


def draw(rng: np.random.Generator, weights: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> int:
    sums = weights.cumsum()  # rng.choice takes ten times as long
    return min(int(sums.searchsorted(rng.random() * sums[-1], side="right")), VOCABULARY - 1)


def logged_request(rng: np.random.Generator) -> Replay:
    """An answer drawn from the target alone, replayed with the draft."""
    tokens = [0]
    for _ in range(ANSWER - 1):
        tokens.append(draw(rng, CHAIN[tokens[-1]]))
    replay = Replay(ANSWER, DEPTH)
    while replay.left:
        at, chances, right = tokens[replay.position], [], 0
        for depth in range(min(DEPTH, replay.left)):
            chances.append(float(CHAIN[at, GUESS[at]]))
            if GUESS[at] != tokens[replay.position + 1 + depth]:
                break
            at, right = int(GUESS[at]), right + 1
        replay.step(right, chances)
    return replay


def verified_request(rng: np.random.Generator) -> int:
    """Verify steps of an answer served with the draft: a coin for each proposal, a residual draw where it fails."""
    emitted, at, steps = 1, 0, 0
    while emitted < ANSWER:
        steps += 1
        for depth in range(DEPTH + 1):
            chances = CHAIN[at].copy()
            if depth < DEPTH and rng.random() < chances[GUESS[at]]:
                at, emitted = int(GUESS[at]), emitted + 1
                continue
            if depth < DEPTH:
                chances[GUESS[at]] = 0.0
            at, emitted = draw(rng, chances), emitted + 1
            break
    return steps


def test_expected_steps_are_those_of_simulated_verification_with_less_variance() -> None:
    rng = np.random.default_rng(12)
    replays = [logged_request(rng) for _ in range(1500)]
    expected = np.array([r.expected().verify_steps for r in replays])
    counted = np.array([r.counted().verify_steps for r in replays])
    simulated = np.array([verified_request(rng) for _ in range(1500)])
    error = math.sqrt((expected.var() + simulated.var()) / 1500)
    assert abs(expected.mean() - simulated.mean()) < 3 * error
    assert error < 0.01 * simulated.mean(), "the comparison shows nothing"
    assert expected.var() < 0.8 * counted.var()


def test_without_a_draft_every_token_but_the_first_takes_a_step() -> None:
    found = baseline_without_draft(report(INCUMBENT, [score("a", 31, 10), score("b", 2, 1)]))
    assert [(s.tokens, s.verify_steps, s.accepted, s.proposed) for s in found.scores] == [(31, 30, 0, 0), (2, 1, 0, 0)]
    assert (found.draft, found.contract) == ("none", None)


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (0.5, 1.875), (1.0, 4.0)])
def test_the_predicted_length_counts_the_bonus_token(rate: float, expected: float) -> None:
    assert expected_length(rate, 3) == pytest.approx(expected)


def test_the_estimate_is_the_difference_of_ratios_of_sums() -> None:
    found = compare([[100, 50, 100, 80], [10, 10, 10, 4]])
    assert found.candidate == pytest.approx(110 / 60)
    assert found.incumbent == pytest.approx(110 / 84)
    assert found.interval.estimate == pytest.approx(110 / 60 - 110 / 84)


def test_equal_drafts_have_no_interval_at_all() -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(10, 90, 300)
    found = compare(np.stack([np.full(300, 97), steps, np.full(300, 97), steps], axis=1))
    assert (found.interval.low, found.interval.estimate, found.interval.high) == (0.0, 0.0, 0.0)


def test_one_conversation_says_nothing_of_others() -> None:
    found = compare([[100, 50, 100, 80]] * 30, ["one"] * 30)
    assert (found.interval.low, found.interval.high) == (-4.0, 4.0)


def test_requests_of_one_conversation_do_not_count_as_many() -> None:
    rng = np.random.default_rng(2)
    rows = np.stack([np.full(30, 100), rng.integers(40, 60, 30), np.full(30, 100), rng.integers(40, 60, 30)], axis=1)
    alone, names = compare(rows), [str(i) for i in range(30)]
    copied = compare(np.concatenate([rows] * 5), names * 5)
    wrong = compare(np.concatenate([rows] * 5))
    width = alone.interval.high - alone.interval.low
    assert copied.interval.high - copied.interval.low == pytest.approx(width, rel=1e-6)
    assert wrong.interval.high - wrong.interval.low < 0.6 * width


def test_the_seed_makes_it_reproducible() -> None:
    rng = np.random.default_rng(3)
    rows = np.stack([np.full(80, 100), rng.integers(40, 60, 80), np.full(80, 100), rng.integers(40, 60, 80)], axis=1)
    assert compare(rows, seed=1) == compare(rows, seed=1)
    assert compare(rows, seed=1) != compare(rows, seed=2)


@pytest.mark.parametrize("bound", ["low", "high"])
def test_a_bound_is_wrong_as_often_as_it_says(bound: str) -> None:
    """600 samples of 60 requests at a nominal 4%: a percentile bootstrap runs at 5 to 9%."""
    rng, wrong, trials = np.random.default_rng(5), 0, 600
    truth = skewed(rng, 200_000)
    tokens_c, steps_c, tokens_i, steps_i = truth.sum(axis=0)
    gain = tokens_c / steps_c - tokens_i / steps_i
    for trial in range(trials):
        found = compare(skewed(rng, 60), alpha=0.04, resamples=400, seed=trial).interval
        wrong += found.low > gain if bound == "low" else found.high < gain
    assert 0.02 <= wrong / trials <= 0.06


def skewed(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    steps = rng.integers(15, 60, count).astype(np.float64)
    tokens = np.round(steps * np.exp(rng.normal(0.3, 0.3, count)))
    better = np.maximum(tokens / steps + rng.normal(0.05, 0.25, count), 1.0)
    return np.stack([tokens, np.maximum(np.round(tokens / better), 1), tokens, steps], axis=1)


def test_a_smaller_alpha_widens_the_interval() -> None:
    rows = skewed(np.random.default_rng(6), 100)
    wide, narrow = compare(rows, alpha=0.001).interval, compare(rows, alpha=0.1).interval
    assert wide.low < narrow.low < narrow.high < wide.high


def test_a_tiny_alpha_is_not_read_off_one_extreme_resample() -> None:
    rows = skewed(np.random.default_rng(6), 100)
    assert compare(rows, alpha=0.001, resamples=200) == compare(rows, alpha=0.001, resamples=10_000)
    assert compare(rows, alpha=0.05, resamples=200) != compare(rows, alpha=0.05, resamples=10_000)


def test_many_conversations_are_grouped_without_losing_the_width() -> None:
    rows = skewed(np.random.default_rng(7), 6 * MAX_CLUSTERS)
    found = compare(rows)
    ratio_c, ratio_i = rows[:, 0].sum() / rows[:, 1].sum(), rows[:, 2].sum() / rows[:, 3].sum()
    residual = (rows[:, 0] - ratio_c * rows[:, 1]) / rows[:, 1].mean() - (rows[:, 2] - ratio_i * rows[:, 3]) / rows[
        :, 3
    ].mean()
    assert found.error == pytest.approx(residual.std() / np.sqrt(len(rows)), rel=0.1)


def test_ten_thousand_requests_take_under_a_second() -> None:
    rows = skewed(np.random.default_rng(8), 10_000)
    started = time.process_time()
    compare(rows, resamples=4000, alpha=0.024)
    assert time.process_time() - started < 1.0
