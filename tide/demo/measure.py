"""Measuring: arms compared on the same held-out prompts, interleaved, in an order that rotates from repeat to repeat.

Owns the protocol of a comparison. Timings on a shared machine drift, so arms are compared within a
repeat and the median ratio over repeats is reported. Knows nothing of how an arm is brought about.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tide.demo.load import LoadResult, serve
from tide.demo.traffic import Prompt
from tide.domain import Record
from tide.engine.base import Engine


@dataclass(frozen=True)
class Arm:
    """One thing to compare."""

    name: str
    prepare: Callable[[], Engine]
    """Brings the arm about (for example swaps a draft) and returns the engine to load; not timed."""


class ArmResult(Record):
    """What one arm reached, medians over the repeats."""

    acceptance_length: float
    """1.0 without speculation."""
    output_tokens_per_s: dict[str, float]
    """By concurrency."""
    repeats: dict[str, tuple[float, ...]]
    """Output tokens a second of every repeat, by concurrency."""


def compare(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    *,
    plan: dict[int, int],
    repeats: int,
    max_new_tokens: int,
    on_pass: Callable[[str], None] = lambda _: None,
) -> dict[str, ArmResult]:
    """Run every arm at every concurrency, ``repeats`` times.

    Args:
        prompts: held-out prompts; each (concurrency, repeat) takes the next ones, the same for every arm.
        plan: requests of one pass, by concurrency.
        on_pass: called before each pass with a line to show.
    """
    passes: dict[tuple[str, int], list[LoadResult]] = {}
    at = 0
    for concurrency, count in plan.items():
        for repeat in range(repeats):
            chosen = [prompts[(at + i) % len(prompts)] for i in range(count)]
            at += count
            shift = repeat % len(arms)
            for arm in (*arms[shift:], *arms[:shift]):
                on_pass(f"repeat {repeat + 1}/{repeats}, concurrency {concurrency}, {arm.name}")
                engine = arm.prepare()
                engine.flush_cache()
                done = serve(engine, chosen, workload="measure", concurrency=concurrency, max_new_tokens=max_new_tokens)
                passes.setdefault((arm.name, concurrency), []).append(done)
    return {arm.name: _summarise(arm.name, passes, list(plan)) for arm in arms}


def _summarise(name: str, passes: dict[tuple[str, int], list[LoadResult]], concurrencies: Sequence[int]) -> ArmResult:
    rates = {str(c): tuple(p.output_tokens_per_s for p in passes[name, c]) for c in concurrencies}
    measured = [s.generation for c in concurrencies for p in passes[name, c] for s in p.served]
    steps = sum(g.verify_steps or 0 for g in measured)
    tokens = sum(g.completion_tokens for g in measured if g.verify_steps)
    return ArmResult(
        acceptance_length=tokens / steps if steps else 1.0,
        output_tokens_per_s={c: statistics.median(r) for c, r in rates.items()},
        repeats=rates,
    )


def ratios(results: dict[str, ArmResult], over: str, under: str) -> dict[str, float]:
    """Median over repeats of the throughput ratio of two arms, by concurrency."""
    a, b = results[over].repeats, results[under].repeats
    return {c: statistics.median(x / y for x, y in zip(a[c], b[c], strict=True)) for c in a}
