"""Predicted throughput: the formula, the load's weights, prefill, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tide.domain import EngineProfile, ProfilePoint
from tide.errors import EvaluationError
from tide.throughput.prediction import break_even, point_at, predict, speedup

ONE = ProfilePoint(concurrency=1, plain_step_s=0.05, verify_step_s=0.06, draft_step_s=0.004)
FOUR = ProfilePoint(concurrency=4, plain_step_s=0.06, verify_step_s=0.09, draft_step_s=0.006)
PROFILE = EngineProfile(points=(ONE, FOUR))
SERVING = EngineProfile(
    points=(ONE, FOUR),
    prefill_request_s=0.02,
    prefill_token_s=0.002,
    draft_prefill_request_s=0.005,
    draft_prefill_token_s=0.0005,
)

histograms = st.dictionaries(st.integers(1, 12), st.floats(1e-3, 1.0), min_size=1)
lengths = st.floats(1.0, 8.0)


def test_the_speedup_is_the_acceptance_length_over_the_cost_of_a_step_in_plain_steps() -> None:
    c, beta = 0.004 / 0.05, 0.06 / 0.05
    assert speedup(2.0, ONE, 3) == pytest.approx(2.0 / (c * 3 + beta))
    assert predict(PROFILE, 2.0, steps=3, concurrency={1: 1.0}) == pytest.approx(2.0 / (c * 3 + beta))


def test_without_draft_steps_only_the_verification_costs() -> None:
    assert predict(PROFILE, 1.0, steps=0, concurrency={1: 1.0}) == pytest.approx(0.05 / 0.06)


def test_a_load_is_weighted_by_the_time_that_its_tokens_take_not_by_their_speed() -> None:
    # 100 tokens at each concurrency, by hand: plain seconds over speculative ones.
    plain = 100 * 0.05 / 1 + 100 * 0.06 / 4
    ours = 100 / 2.0 * (0.06 + 3 * 0.004) / 1 + 100 / 2.0 * (0.09 + 3 * 0.006) / 4
    found = predict(PROFILE, 2.0, steps=3, concurrency={1: 0.5, 4: 0.5})
    assert found == pytest.approx(plain / ours)
    assert found != pytest.approx((speedup(2.0, ONE, 3) + speedup(2.0, FOUR, 3)) / 2, rel=1e-3)


def test_a_request_is_its_prefill_and_its_steps() -> None:
    # 100 tokens after 50 prompt tokens, four at a time: a request has its prefill alone and a quarter of each step.
    plain = (0.02 + 50 * 0.002) + 99 * 0.06 / 4
    ours = (0.02 + 50 * 0.002) + (0.005 + 50 * 0.0005) + 100 / 2.5 * (0.09 + 3 * 0.006) / 4
    found = predict(SERVING, 2.5, steps=3, concurrency={4: 1.0}, prompt_tokens=50, output_tokens=100)
    assert found == pytest.approx(plain / ours)


def test_prefill_is_left_out_when_no_length_is_known_and_vanishes_in_long_answers() -> None:
    bare = predict(PROFILE, 2.5, steps=3, concurrency={1: 1.0})
    assert predict(SERVING, 2.5, steps=3, concurrency={1: 1.0}) == bare
    long = predict(SERVING, 2.5, steps=3, concurrency={1: 1.0}, prompt_tokens=50, output_tokens=1e7)
    assert long == pytest.approx(bare, rel=1e-4)


def test_a_long_prompt_brings_the_speedup_towards_that_of_prefill_alone() -> None:
    found = [
        predict(SERVING, 3.0, steps=3, concurrency={1: 1.0}, prompt_tokens=p, output_tokens=50) for p in (0, 500, 10**7)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(0.002 / 0.0025, rel=1e-3)


@given(lengths, lengths, histograms, st.integers(0, 6), st.floats(0, 1000), st.floats(1, 1000))
def test_a_longer_acceptance_never_predicts_less(
    a: float, b: float, load: dict[int, float], steps: int, prompt: float, output: float
) -> None:
    shorter, longer = (
        predict(SERVING, al, steps=steps, concurrency=load, prompt_tokens=prompt, output_tokens=output)
        for al in sorted((a, b))
    )
    assert shorter <= longer * (1 + 1e-12)


@given(lengths, histograms, st.integers(0, 6))
def test_a_load_lies_between_its_best_and_its_worst_concurrency(
    length: float, load: dict[int, float], steps: int
) -> None:
    alone = [predict(PROFILE, length, steps=steps, concurrency={b: 1.0}) for b in load]
    assert min(alone) * (1 - 1e-9) <= predict(PROFILE, length, steps=steps, concurrency=load) <= max(alone) * (1 + 1e-9)


@given(lengths, histograms, st.floats(1e-3, 1e3))
def test_only_the_proportions_of_a_histogram_count(length: float, load: dict[int, float], factor: float) -> None:
    scaled = {b: share * factor for b, share in load.items()}
    one, other = (predict(PROFILE, length, steps=3, concurrency=h) for h in (load, scaled))
    assert one == pytest.approx(other)


@given(histograms, st.integers(0, 6), st.floats(0, 200), st.floats(60, 1000))
def test_at_break_even_both_ways_are_equally_fast(
    load: dict[int, float], steps: int, prompt: float, output: float
) -> None:
    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    even = break_even(SERVING, steps=steps, concurrency=load, **lengths)
    assert predict(SERVING, even, steps=steps, concurrency=load, **lengths) == pytest.approx(1.0)
    bare = break_even(SERVING, steps=steps, concurrency=load)
    assert predict(SERVING, bare, steps=steps, concurrency=load) == pytest.approx(1.0)
    assert bare < even, "prefill and its draft's part only make it harder"


def test_break_even_is_the_boundary() -> None:
    even = break_even(PROFILE, steps=3, concurrency={4: 1.0})
    assert even == pytest.approx((0.09 + 3 * 0.006) / 0.06)
    assert predict(PROFILE, even - 1e-6, steps=3, concurrency={4: 1.0}) < 1
    assert predict(PROFILE, even + 1e-6, steps=3, concurrency={4: 1.0}) > 1


def test_nothing_breaks_even_where_the_drafts_prefill_alone_takes_longer() -> None:
    found = break_even(SERVING, steps=3, concurrency={4: 1.0}, prompt_tokens=10_000, output_tokens=2)
    assert found == math.inf


def test_step_times_are_linear_between_the_points_and_flat_beyond() -> None:
    two = point_at(PROFILE, 2)
    assert two.plain_step_s == pytest.approx(0.05 + 0.01 / 3)
    assert two.verify_step_s == pytest.approx(0.07)
    assert two.draft_step_s == pytest.approx(0.004 + 0.002 / 3)
    assert point_at(PROFILE, 64) == FOUR.model_copy(update={"concurrency": 64})


@pytest.mark.parametrize("load", [{}, {1: 0.0}, {1: 0.0, 4: 0.0}, {1: math.nan}, {1: math.inf}])
def test_an_empty_histogram_is_an_error_that_says_what_to_do(load: dict[int, float]) -> None:
    for asked in (
        lambda: predict(PROFILE, 2.0, steps=3, concurrency=load),
        lambda: break_even(PROFILE, steps=3, concurrency=load),
    ):
        with pytest.raises(EvaluationError, match="serve and harvest some requests"):
            asked()


@pytest.mark.parametrize("load", [{0: 1.0}, {1: 2.0, 4: -0.5}])
def test_what_is_no_histogram_is_an_error(load: dict[int, float]) -> None:
    with pytest.raises(EvaluationError, match="no concurrency histogram"):
        predict(PROFILE, 2.0, steps=3, concurrency=load)


@pytest.mark.parametrize("length", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_acceptance_length_is_an_error(length: float) -> None:
    with pytest.raises(EvaluationError, match="acceptance length"):
        predict(PROFILE, length, steps=3, concurrency={1: 1.0})


@pytest.mark.parametrize(("prompt", "output"), [(-1.0, 10.0), (10.0, 0.5), (math.nan, 10.0), (10.0, math.nan)])
def test_a_request_without_a_length_is_an_error(prompt: float, output: float) -> None:
    with pytest.raises(EvaluationError, match="is none"):
        predict(PROFILE, 2.0, steps=3, concurrency={1: 1.0}, prompt_tokens=prompt, output_tokens=output)


def test_a_profile_of_one_speculative_engine_holds_for_its_steps_alone() -> None:
    whole = ProfilePoint(concurrency=1, plain_step_s=0.05, verify_step_s=0.072, draft_step_s=0.0)
    bound = EngineProfile(points=(whole,), steps=3)
    assert predict(bound, 2.0, steps=3, concurrency={1: 1.0}) == pytest.approx(2.0 * 0.05 / 0.072)
    with pytest.raises(EvaluationError, match="measured with 3 draft steps"):
        predict(bound, 2.0, steps=2, concurrency={1: 1.0})
    with pytest.raises(EvaluationError, match="second engine"):
        break_even(bound, steps=4, concurrency={1: 1.0})


@pytest.mark.parametrize("points", [(FOUR, ONE), (ONE, ONE), ()])
def test_points_stand_once_each_by_rising_concurrency(points: tuple[ProfilePoint, ...]) -> None:
    with pytest.raises(ValidationError, match="points"):
        EngineProfile(points=points)
