"""The closed loop that speeds are measured in, and what a condition of ``speed.json`` says of it.

Owns prompts, arms, the order in which they take turns and the row of a condition. Knows nothing of starting engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tide.demo.traffic import load_workload
from tide.engine.base import Generation
from tide.engine.sglang import SglangEngine
from tide.throughput.load import concurrency_histogram

WORKLOADS = ("chat", "functions", "code")


@dataclass(frozen=True)
class Prompt:
    """One request to be."""

    workload: str
    request: str
    """Its id in the corpus; empty when it is not of the corpus."""
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Arm:
    """One way of decoding: plain (no draft, 0 steps), or a draft with its steps."""

    engine: SglangEngine
    draft: str = "none"
    digest: str = ""
    steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.draft}/{self.steps}" if self.steps else "plain"

    def prepare(self) -> None:
        """The draft is in serving and no prompt is cached; not timed."""
        if self.digest:
            self.engine.swap_draft(self.digest)
        self.engine.flush_cache()


@dataclass
class Pass:
    """Answers of one arm to some prompts, in the order of the prompts, and when each began and ended."""

    answers: list[Generation]
    started: list[float]
    finished: list[float]
    wall_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.wall_s = max(self.finished) - min(self.started)

    @property
    def tokens(self) -> int:
        return sum(a.completion_tokens for a in self.answers)

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.wall_s


def read_prompts(path: Path | None) -> dict[str, list[Prompt]]:
    """Prompts by workload, in the order of the file."""
    if path is None:
        return {name: [Prompt(name, "", p.messages) for p in load_workload(name)] for name in WORKLOADS}
    found: dict[str, list[Prompt]] = {}
    for line in filter(str.strip, path.read_text().splitlines()):
        row = json.loads(line)
        prompt = Prompt(row["workload"], str(row.get("request") or ""), tuple(row["messages"]))
        found.setdefault(prompt.workload, []).append(prompt)
    return found


def serve(arm: Arm, prompts: Sequence[Prompt], concurrency: int, tokens: int) -> Pass:
    """All prompts in a closed loop.

    Answers of plain decoding would all end together, and their next prompts be prefilled together, as no service's are:
    the first request of each place in the loop is cut short, at another length each. (In an engine simulated with known
    costs that takes a bias of 5% off the speedup at concurrency 4.)
    """

    def one(at: int) -> tuple[Generation, float, float]:
        limit = tokens if at >= concurrency else max(tokens * (at + 1) // concurrency, 2)
        began = time.perf_counter()
        answer = arm.engine.generate(prompts[at].messages, max_new_tokens=limit)
        return answer, began, time.perf_counter()

    with ThreadPoolExecutor(concurrency) as pool:
        done = list(pool.map(one, range(len(prompts))))
    answers, started, finished = (list(column) for column in zip(*done, strict=True))
    return Pass(answers, started, finished)


class Conditions:
    """Every workload at every concurrency, repeat by repeat.

    Repeats are outermost, so that the repeats of a condition lie far apart: the speed of a shared machine drifts.
    """

    def __init__(self, arms: Sequence[Arm], prompts: dict[str, list[Prompt]], args: argparse.Namespace) -> None:
        self._arms, self._prompts, self._args = arms, prompts, args
        self._passes: dict[tuple[str, int], dict[str, list[Pass]]] = {
            (workload, concurrency): {arm.name: [] for arm in arms}
            for workload in prompts
            for concurrency in args.concurrency
        }
        self._used: dict[tuple[str, int], list[str]] = {key: [] for key in self._passes}

    def __len__(self) -> int:
        return len(self._passes) * self._args.repeats

    def rounds(self) -> Iterator[str]:
        """Serve one repeat of one condition by all arms in turn; yields what was served."""
        at = dict.fromkeys(self._prompts, 0)
        for repeat in range(self._args.repeats):
            for workload, concurrency in self._passes:
                own, count = self._prompts[workload], self._args.concurrency[concurrency]
                chosen = [own[(at[workload] + i) % len(own)] for i in range(count)]
                at[workload] += count
                rates = self._serve((workload, concurrency), chosen, shift=repeat % len(self._arms))
                yield f"{workload}, concurrency {concurrency}, repeat {repeat + 1}/{self._args.repeats}: {rates}"

    def _serve(self, key: tuple[str, int], chosen: Sequence[Prompt], shift: int) -> str:
        self._used[key] += [p.request for p in chosen if p.request]
        rates = []
        for arm in (*self._arms[shift:], *self._arms[:shift]):
            arm.prepare()
            done = serve(arm, chosen, key[1], self._args.tokens)
            self._passes[key][arm.name].append(done)
            rates.append(f"{arm.name} {done.rate:.1f}")
        return ", ".join(rates) + " tok/s"

    def rows(self) -> list[dict[str, Any]]:
        """Rows of speed.json, of the repeats so far."""
        return [
            condition(arm, *key, passes["plain"], passes[arm.name]) | {"requests": self._used[key]}
            for key, passes in self._passes.items()
            for arm in self._arms
            if arm.steps and passes[arm.name]
        ]


def condition(arm: Arm, workload: str, concurrency: int, plain: list[Pass], ours: list[Pass]) -> dict[str, Any]:
    """One row of speed.json. Rates are medians of the repeats; the speedup is the median of their ratios."""
    answers = [a for done in ours for a in done.answers]
    counted = [a for a in answers if a.verify_steps]
    started, finished = ([t for done in ours for t in getattr(done, name)] for name in ("started", "finished"))
    return {
        "draft": arm.draft,
        "steps": arm.steps,
        "workload": workload,
        "concurrency": concurrency,
        "plain_tok_s": statistics.median(p.rate for p in plain),
        "spec_tok_s": statistics.median(o.rate for o in ours),
        "speedup": statistics.median(o.rate / p.rate for o, p in zip(ours, plain, strict=True)),
        "speedup_repeats": [o.rate / p.rate for o, p in zip(ours, plain, strict=True)],
        "acceptance_length": sum(a.completion_tokens for a in counted) / sum(a.verify_steps or 0 for a in counted),
        "prompt_tokens": float(np.mean([a.prompt_tokens - a.cached_tokens for a in answers])),
        "output_tokens": float(np.mean([a.completion_tokens for a in answers])),
        "histogram": concurrency_histogram(started, finished, [a.completion_tokens for a in answers]),
        "answers": len(answers),
    }


def arms_of(plain: SglangEngine, speculative: dict[int, SglangEngine], digests: dict[str, str]) -> list[Arm]:
    """Plain decoding, every draft with the last number of steps, and the first draft with the others."""
    *others, main = speculative
    first = next(iter(digests))
    served = [(main, name) for name in digests] + [(steps, first) for steps in others]
    return [Arm(plain), *(Arm(speculative[steps], name, digests[name], steps) for steps, name in served)]
