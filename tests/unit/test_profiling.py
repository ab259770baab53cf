"""Measuring a profile: step times come out as they went in, and engines that cannot be compared are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support import simulated_engine
from tests.support.simulated_engine import SimulatedEngine
from tests.support.tiny import TARGET
from tide.domain import PROBE_SLICE, EngineProfile, ProfilePoint
from tide.engine.base import Engine, Generation, Speculation
from tide.errors import ContractMismatch, EvaluationError
from tide.throughput import profiles, profiling
from tide.throughput.load import concurrency_histogram
from tide.throughput.prediction import predict
from tide.throughput.step_times import Plan, at_once

PLAN = Plan(concurrency=(1, 2, 8), repeats=3)
DRAFTS = "svc-drafts"
OTHER = TARGET.model_copy(update={"dtype": "float32"})


class Timed(FakeEngine):
    """Answers take what a machine of known costs takes; of several at once the first has the fewest steps."""

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        length: float = 2.0,
        base_s: float = 0.03,
        token_s: float = 0.001,
        **options: Any,
    ) -> None:
        super().__init__(name, steps=steps, **options)
        self.length, self.base_s, self.token_s = length, base_s, token_s
        self.noise = iter([0.0] * 10**6)
        self.cached = 0
        self.asked: list[tuple[int, int]] = []

    def step_s(self, concurrency: int) -> float:
        plain = 0.05 + 0.005 * concurrency
        return plain + 0.02 + self._steps * 0.004 * concurrency if self._steps else plain

    def answers(self, prompts: Sequence[str], tokens: int) -> list[Generation]:
        self.asked.append((len(prompts), tokens))
        own = [len(p.split()) for p in prompts]
        prefill = self.base_s + self.token_s * sum(n - self.cached for n in own)
        found = []
        for i, words in enumerate(own):
            steps = round((tokens - 1) / (self.length if self._steps else 1.0)) + i
            took = prefill + steps * self.step_s(len(prompts)) + next(self.noise)
            found.append(
                Generation(
                    request=str(i),
                    text="",
                    prompt_tokens=words,
                    cached_tokens=self.cached,
                    completion_tokens=tokens,
                    verify_steps=steps if self._steps and steps else None,
                    latency_s=took,
                )
            )
        return found


def ask(engine: Engine, prompts: Sequence[str], tokens: int) -> list[Generation]:
    assert isinstance(engine, Timed)
    return engine.answers(prompts, tokens)


def measure(plain: Timed, *speculative: Timed, plan: Plan = PLAN) -> EngineProfile:
    return profiling.measure(plain, speculative, plan, ask=ask)


def test_two_speculative_engines_tell_draft_steps_from_verification() -> None:
    found = measure(Timed("plain", 0), Timed("one", 1), Timed("three", 3))
    assert found.steps is None
    for point, b in zip(found.points, (1, 2, 8), strict=True):
        assert point.concurrency == b
        assert point.plain_step_s == pytest.approx(0.05 + 0.005 * b)
        assert point.verify_step_s == pytest.approx(0.07 + 0.005 * b)
        assert point.draft_step_s == pytest.approx(0.004 * b)


def test_one_speculative_engine_gives_its_whole_step_and_binds_the_profile_to_it() -> None:
    found = measure(Timed("plain", 0), Timed("three", 3))
    assert (found.steps, found.draft_tokens) == (3, 4)
    assert [p.draft_step_s for p in found.points] == [0.0, 0.0, 0.0]
    assert found.points[1].verify_step_s == pytest.approx(0.05 + 0.01 + 0.02 + 3 * 0.008)


def test_an_engine_that_verifies_without_a_draft_is_one_with_zero_draft_steps() -> None:
    class Undrafted(Timed):
        def speculation(self) -> Speculation:
            return Speculation(engine="fake 1", speculative=True, steps=0, topk=1, draft_tokens=1)

        def step_s(self, concurrency: int) -> float:
            return 0.07 + 0.005 * concurrency

    found = measure(Timed("plain", 0), Undrafted("zero", 0), Timed("three", 3))
    assert found.points[0].verify_step_s == pytest.approx(0.075)
    assert found.points[0].draft_step_s == pytest.approx(0.004)


def test_prefill_is_a_line_by_the_tokens_that_are_not_cached_and_the_draft_adds_to_it() -> None:
    plain, ours = Timed("plain", 0), Timed("three", 3, base_s=0.04, token_s=0.0015)
    plain.cached = ours.cached = 5
    found = measure(plain, ours)
    assert found.prefill_request_s == pytest.approx(0.03)
    assert found.prefill_token_s == pytest.approx(0.001)
    assert found.draft_prefill_request_s == pytest.approx(0.01)
    assert found.draft_prefill_token_s == pytest.approx(0.0005)


def test_a_slow_repeat_does_not_move_the_median() -> None:
    plain = Timed("plain", 0)
    # Warm-up (8 answers), then the long answer of the first repeat at concurrency 1 is held up.
    plain.noise = iter([0.0] * 9 + [5.0] + [0.0] * 10**4)
    found = measure(plain, Timed("three", 3))
    assert found.points[0].plain_step_s == pytest.approx(0.055)


def test_a_draft_step_that_drowns_in_noise_costs_nothing_rather_than_less() -> None:
    class Odd(Timed):
        def step_s(self, concurrency: int) -> float:
            return 0.08 if self._steps == 1 else 0.079

    found = measure(Timed("plain", 0), Odd("one", 1), Odd("three", 3))
    assert found.points[0].draft_step_s == 0.0
    assert found.points[0].verify_step_s == pytest.approx(0.0795)


def test_engines_take_turns_and_get_what_the_plan_says_and_no_more() -> None:
    plain, ours = Timed("plain", 0), Timed("three", 3)
    measure(plain, ours)
    each = [(b, n) for b in (1, 2, 8) for n in (8, 40)] + [(1, 1), (1, 1)]
    assert plain.asked == ours.asked == [(8, 2), *each * 3]


@pytest.mark.parametrize(
    ("plain", "speculative", "says"),
    [
        (Timed("p", 0), [], "no speculative engine"),
        (Timed("p", 2), [Timed("a", 3)], "plain engine speculates"),
        (Timed("p", 0), [Timed("a", 0)], "does not speculate"),
        (Timed("p", 0), [Timed("a", 3), Timed("b", 3)], "same number"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused_before_anything_is_sent(
    plain: Timed, speculative: list[Timed], says: str
) -> None:
    with pytest.raises(EvaluationError, match=says):
        measure(plain, *speculative)
    assert plain.asked == []


def test_two_trees_are_refused_and_one_is_measured() -> None:
    class Tree(Timed):
        def speculation(self) -> Speculation:
            return Speculation(engine="fake 1", speculative=True, steps=self._steps, topk=4, draft_tokens=16)

    found = measure(Timed("plain", 0), Tree("tree", 3))
    assert (found.topk, found.draft_tokens, found.steps) == (4, 16, 3)
    with pytest.raises(EvaluationError, match="tree"):
        measure(Timed("plain", 0), Tree("a", 3), Tree("b", 5))


def test_engines_of_different_targets_are_refused_by_the_part_that_differs() -> None:
    with pytest.raises(ContractMismatch, match="dtype"):
        measure(Timed("plain", 0), Timed("a", 1, target=TARGET), Timed("b", 3, target=OTHER))


def test_an_answer_cut_short_by_the_context_is_an_error() -> None:
    class Short(Timed):
        def answers(self, prompts: Sequence[str], tokens: int) -> list[Generation]:
            return [a.model_copy(update={"completion_tokens": 2}) for a in super().answers(prompts, tokens)]

    with pytest.raises(EvaluationError, match="context is too short"):
        measure(Short("plain", 0), Timed("three", 3))


def test_a_prompt_found_in_the_cache_times_no_prefill() -> None:
    class Cached(Timed):
        def answers(self, prompts: Sequence[str], tokens: int) -> list[Generation]:
            found = super().answers(prompts, tokens)
            return [a.model_copy(update={"cached_tokens": a.prompt_tokens}) for a in found] if tokens == 1 else found

    with pytest.raises(EvaluationError, match="in its cache"):
        measure(Cached("plain", 0), Timed("three", 3))


def test_a_step_of_less_than_no_time_is_an_error_that_names_the_noise() -> None:
    class Wild(Timed):
        def step_s(self, concurrency: int) -> float:
            return -0.01

    with pytest.raises(EvaluationError, match="something else used the engine"):
        measure(Wild("plain", 0), Timed("three", 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"concurrency": ()},
        {"concurrency": (0, 1)},
        {"concurrency": (4, 2)},
        {"concurrency": (1, 1)},
        {"short_tokens": 40},
        {"long_prompt_words": 16},
        {"repeats": 0},
    ],
)
def test_a_plan_that_measures_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Plan(**changes)


def test_requests_are_sent_together_of_fixed_length_unlogged_and_under_their_own_slice() -> None:
    class Told(FakeEngine):
        told: list[dict[str, Any]]

        def generate(self, messages: Sequence[dict[str, str]], **options: Any) -> Generation:  # type: ignore[override]
            self.told.append(options)
            return super().generate(messages, **options)

    engine = Told(steps=3)
    engine.told = []
    answers = at_once(engine, ["a", "b", "c"], 7)
    assert [a.completion_tokens for a in answers] == [7, 7, 7]
    assert engine.told == [{"max_new_tokens": 7, "slice": PROBE_SLICE, "no_logs": True, "ignore_eos": True}] * 3


def test_what_is_to_be_compared_is_measured_between_the_repeats() -> None:
    told: list[str] = []
    profiling.measure(
        Timed("plain", 0),
        [Timed("three", 3)],
        PLAN,
        ask=ask,
        report=told.append,
        between=lambda: told.append("between"),
    )
    assert told[:6] == ["repeat 1/3", "between", "repeat 2/3", "between", "repeat 3/3", "between"]


def profile(verify: float = 0.06, **fields: Any) -> EngineProfile:
    point = ProfilePoint(concurrency=1, plain_step_s=0.05, verify_step_s=verify, draft_step_s=0.0)
    return EngineProfile(points=(point,), **({"target": TARGET} | fields))


def test_the_newest_profile_of_the_target_counts_and_only_for_its_steps() -> None:
    store = MemoryStore()
    assert profiles.newest_for(store, DRAFTS, TARGET) is None
    older, bound, foreign = profile(0.07), profile(0.06, steps=3), profile(0.05, target=OTHER)
    for one in (older, bound, foreign):
        path = profiles.keep(store, DRAFTS, one)
        assert "-profile-" in path
    assert profiles.newest_for(store, DRAFTS, TARGET) == bound
    assert profiles.newest_for(store, DRAFTS, TARGET, steps=3) == bound
    assert profiles.newest_for(store, DRAFTS, TARGET, steps=2) == older
    assert profiles.newest_for(store, DRAFTS, OTHER, steps=2) == foreign


def test_a_profile_of_no_target_is_not_kept_where_nobody_would_find_it() -> None:
    with pytest.raises(EvaluationError, match="captures"):
        profiles.keep(MemoryStore(), DRAFTS, profile(target=None))


def profiled(*steps: int) -> EngineProfile:
    engines = [SimulatedEngine(f"steps-{g}", g, rate=0.5, seed=g) for g in steps]
    plan = Plan(repeats=2)
    return profiling.measure(SimulatedEngine("plain", 0), engines, plan, ask=simulated_engine.ask)


def test_the_profile_of_an_engine_that_batches_is_its_real_costs() -> None:
    found = profiled(1, 3)
    truth = SimulatedEngine
    for point in found.points:
        b = point.concurrency
        plain = truth.base_s + b * truth.each_s
        assert point.plain_step_s == pytest.approx(plain)
        assert point.verify_step_s == pytest.approx(plain + truth.verify_s + b * truth.verify_each_s)
        assert point.draft_step_s == pytest.approx(truth.draft_s + b * truth.draft_each_s)
    assert found.prefill_request_s == pytest.approx(truth.prefill_s)
    assert found.prefill_token_s == pytest.approx(truth.prefill_token_s)
    assert found.draft_prefill_token_s == pytest.approx(truth.draft_prefill_token_s)


@pytest.mark.parametrize("concurrency", [1, 4, 8])
@pytest.mark.parametrize("prompt", [20, 250])
@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_a_predicted_speedup_is_that_of_an_engine_that_batches(concurrency: int, prompt: int, rate: float) -> None:
    # Answers of different lengths, as a service has them: nobody keeps step with anybody.
    lengths = [(prompt, 20 + 7 * i % 60) for i in range(200)]
    plain = SimulatedEngine("plain", 0).closed_loop(lengths, concurrency)
    ours = SimulatedEngine("three", 3, rate=rate, seed=1).closed_loop(lengths, concurrency)
    measured = max(job.finished for job in plain) / max(job.finished for job in ours)
    tokens = [job.made for job in ours]
    predicted = predict(
        profiled(1, 3),
        sum(tokens) / sum(job.verify_steps for job in ours),
        steps=3,
        concurrency=concurrency_histogram([j.arrived for j in ours], [j.finished for j in ours], tokens),
        prompt_tokens=prompt,
        output_tokens=sum(tokens) / len(tokens),
    )
    print(f"{concurrency} at once, prompt {prompt}, rate {rate}: predicted {predicted:.3f}, measured {measured:.3f}")
    assert predicted == pytest.approx(measured, rel=0.02)
