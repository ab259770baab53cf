"""Seconds of an engine's steps and of its prefill, from requests that are sent to it.

Owns what is sent and how latencies become times. Works over the engine port; knows nothing of draft steps.

A step's time is a difference of two lengths: answers of ``long_tokens`` and of ``short_tokens``, everything else
equal, so that prefill and the way to the engine cancel. Of the requests sent together the first to end is timed: as
long as it ran, all others ran beside it. Medians over the repeats; engines take turns within a repeat, since a shared
machine's speed drifts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from tide.domain import PROBE_SLICE, Value
from tide.engine.base import Engine, Generation
from tide.errors import EvaluationError

Ask = Callable[[Engine, Sequence[str], int], list[Generation]]
"""Sends all prompts at once for answers of so many tokens each."""
Report = Callable[[str], None]


class Plan(Value):
    """What is sent. With E engines and C the sum of ``concurrency``: about E (2 C + 2) requests a repeat."""

    concurrency: tuple[int, ...] = Field(default=(1, 2, 4, 8), min_length=1)
    """By rising numbers."""
    short_tokens: int = Field(default=8, ge=2)
    long_tokens: int = Field(default=40, ge=3)
    prompt_words: int = Field(default=16, ge=1)
    long_prompt_words: int = Field(default=160, ge=2)
    """Of the prompt that prefill's cost by the token is taken from."""
    repeats: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.concurrency[0] < 1 or any(a >= b for a, b in pairwise(self.concurrency)):
            raise ValueError(f"concurrency {self.concurrency}: give rising numbers from 1 on")
        if self.long_tokens <= self.short_tokens or self.long_prompt_words <= self.prompt_words:
            raise ValueError("the long answers and prompts must be longer than the short ones")
        return self


class Spread(Value):
    """One figure of one engine: the median of its repeats, and how far they lie apart."""

    median: float
    relative: float
    """Half of the range between the quartiles, over the median."""


@dataclass(frozen=True)
class EngineTimes:
    """Medians of one engine."""

    step_s: dict[int, float]
    """By concurrency."""
    spread: dict[int, float]
    """Half of the range between the quartiles of the repeats, over the median."""
    prefill_request_s: float
    prefill_token_s: float


def take_times(
    engines: Sequence[Engine], plan: Plan, report: Report, ask: Ask, between: Callable[[], object] = lambda: None
) -> list[EngineTimes]:
    """Times of every engine, in the order of the engines.

    Args:
        between: called after each repeat, the engines idle.

    Raises:
        EvaluationError: an answer told nothing; names the engine.
        EngineError: an engine failed.
    """
    # Other numbers each time the command runs: an engine may still hold the prompts of an earlier one.
    probes = [_Probe(engine, plan, ask, count(time.time_ns() + i, len(engines))) for i, engine in enumerate(engines)]
    for probe in probes:
        probe.warm_up()
    steps: list[dict[int, list[float]]] = [{b: [] for b in plan.concurrency} for _ in probes]
    prefills: list[list[tuple[float, float]]] = [[] for _ in probes]
    for repeat in range(plan.repeats):
        report(f"repeat {repeat + 1}/{plan.repeats}")
        order = [(i + repeat) % len(probes) for i in range(len(probes))]
        for b in plan.concurrency:
            for i in order:
                steps[i][b].append(probes[i].step(b))
        for i in order:
            prefills[i].append(probes[i].prefill())
        between()
    found = [_medians(*taken) for taken in zip(steps, prefills, strict=True)]
    for engine, times in zip(engines, found, strict=True):
        said = ", ".join(f"{b}: {1e3 * s:.1f} ms ±{times.spread[b]:.0%}" for b, s in times.step_s.items())
        prefill = f"{1e3 * times.prefill_request_s:.1f} ms and {1e3 * times.prefill_token_s:.2f} ms a token"
        report(f"{engine.name}: a step at concurrency {said}; prefill {prefill}")
    return found


def at_once(engine: Engine, prompts: Sequence[str], tokens: int) -> list[Generation]:
    """Every prompt from a thread of its own."""

    def one(prompt: str) -> Generation:
        return engine.generate(
            [{"role": "user", "content": prompt}],
            max_new_tokens=tokens,
            slice=PROBE_SLICE,
            no_logs=True,
            ignore_eos=True,
        )

    with ThreadPoolExecutor(len(prompts), thread_name_prefix="profile") as pool:
        return list(pool.map(one, prompts))


@dataclass(frozen=True)
class _Probe:
    """What is asked of one engine."""

    engine: Engine
    plan: Plan
    ask: Ask
    numbers: Iterator[int]

    def warm_up(self) -> None:
        """First requests are slow."""
        self.ask(self.engine, self._prompts(self.plan.concurrency[-1], self.plan.prompt_words), 2)

    def step(self, concurrency: int) -> float:
        """Seconds of a step with so many requests running."""
        seconds, steps = [], []
        for tokens in (self.plan.short_tokens, self.plan.long_tokens):
            answers = self.ask(self.engine, self._prompts(concurrency, self.plan.prompt_words), tokens)
            first = min(answers, key=lambda a: a.latency_s)
            _check_length(self.engine, first, tokens)
            seconds.append(first.latency_s)
            steps.append(_steps_of(first))
        if steps[1] <= steps[0]:
            raise EvaluationError(
                f"{self.engine.name}: {self.plan.long_tokens} tokens took {steps[1]} steps and "
                f"{self.plan.short_tokens} took {steps[0]}: set the lengths further apart"
            )
        return (seconds[1] - seconds[0]) / (steps[1] - steps[0])

    def prefill(self) -> tuple[float, float]:
        """(prompt tokens that were not cached, seconds) of a short and a long prompt, as a line: base and slope."""
        found = []
        for words in (self.plan.prompt_words, self.plan.long_prompt_words):
            (answer,) = self.ask(self.engine, self._prompts(1, words), 1)
            found.append((answer.prompt_tokens - answer.cached_tokens, answer.latency_s))
        (a, short), (b, long) = found
        if b <= a:
            raise EvaluationError(f"{self.engine.name}: it had the long prompt in its cache: prefill cannot be timed")
        slope = (long - short) / (b - a)
        return short - slope * a, slope

    def _prompts(self, number: int, words: int) -> list[str]:
        text = "word " * words
        return [f"{next(self.numbers)} {text}" for _ in range(number)]


def _medians(steps: dict[int, list[float]], prefills: Sequence[tuple[float, float]]) -> EngineTimes:
    quartiles = {b: np.quantile(seconds, (0.25, 0.5, 0.75)) for b, seconds in steps.items()}
    base, slope = (statistics.median(line[i] for line in prefills) for i in range(2))
    return EngineTimes(
        step_s={b: float(q[1]) for b, q in quartiles.items()},
        spread={b: float((q[2] - q[0]) / 2 / abs(q[1])) if q[1] else 0.0 for b, q in quartiles.items()},
        # Prefill of a short prompt may drown in noise, but it takes no less than no time.
        prefill_request_s=max(base, 0.0),
        prefill_token_s=max(slope, 0.0),
    )


def _steps_of(answer: Generation) -> int:
    """Steps of the engine for an answer: verify steps, or, where none is counted, a token each after prefill's."""
    return answer.completion_tokens - 1 if answer.verify_steps is None else answer.verify_steps


def _check_length(engine: Engine, answer: Generation, tokens: int) -> None:
    if answer.completion_tokens != tokens:
        raise EvaluationError(
            f"{engine.name}: an answer has {answer.completion_tokens} tokens, {tokens} were asked for: "
            "its context is too short for the profile's lengths"
        )
