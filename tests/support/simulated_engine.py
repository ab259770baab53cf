"""An engine in simulated time that batches as SGLang does: who waits is prefilled first, then all take a step together.

Costs and acceptance are known, so that what a profile measures and what it predicts can be compared with the truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fakes.fake_engine import FakeEngine
from tide.engine.base import Engine, Generation


@dataclass
class Job:
    """A request on its way through the engine."""

    prompt: int
    limit: int
    arrived: float
    made: int = 0
    verify_steps: int = 0
    finished: float = 0.0


class SimulatedEngine(FakeEngine):
    """Seconds of a step at b requests: ``base_s + b each_s``, and ``draft_s + b draft_each_s`` for each draft step.

    Args:
        steps: draft steps; 0: plain decoding.
        rate: chance that a draft token is right when those before it were.
    """

    base_s, each_s, draft_s, draft_each_s = 0.045, 0.006, 0.003, 0.001
    verify_s, verify_each_s = 0.008, 0.004
    """What a verify step takes beyond a plain one."""
    prefill_s, prefill_token_s, draft_prefill_token_s = 0.03, 0.0015, 0.0002

    def __init__(self, name: str, steps: int, rate: float = 0.0, seed: int = 0) -> None:
        super().__init__(name, steps=steps)
        self.rate, self.random = rate, random.Random(seed)

    def step_s(self, b: int) -> float:
        plain = self.base_s + b * self.each_s
        if not self._steps:
            return plain
        return plain + self.verify_s + b * self.verify_each_s + self._steps * (self.draft_s + b * self.draft_each_s)

    def closed_loop(self, requests: Sequence[tuple[int, int]], concurrency: int) -> list[Job]:
        """Serve requests of (prompt tokens, answer tokens), so many at a time."""
        queue, done = [Job(p, n, 0.0) for p, n in requests], list[Job]()
        waiting, running, now, at = queue[:concurrency], list[Job](), 0.0, concurrency
        while waiting or running:
            if waiting:
                token_s = self.prefill_token_s + (self.draft_prefill_token_s if self._steps else 0.0)
                now += self.prefill_s + token_s * sum(job.prompt for job in waiting)
                for job in waiting:
                    job.made = 1
                running, waiting = running + waiting, []
            else:
                now += self.step_s(len(running))
                for job in running:
                    job.verify_steps += 1
                    job.made = min(job.made + self._accepted() + 1, job.limit)
            for job in [job for job in running if job.made >= job.limit]:
                job.finished = now
                running.remove(job)
                done.append(job)
                if at < len(queue):
                    queue[at].arrived = now
                    waiting.append(queue[at])
                    at += 1
        return queue

    def _accepted(self) -> int:
        accepted = 0
        while accepted < self._steps and self.random.random() < self.rate:
            accepted += 1
        return accepted


def ask(engine: Engine, prompts: Sequence[str], tokens: int) -> list[Generation]:
    """All at once, as a profile asks."""
    assert isinstance(engine, SimulatedEngine)
    jobs = engine.closed_loop([(len(p.split()), tokens) for p in prompts], len(prompts))
    return [
        Generation(
            request=str(i),
            text="",
            prompt_tokens=job.prompt,
            completion_tokens=job.made,
            verify_steps=(job.verify_steps or None) if engine.speculation().speculative else None,
            latency_s=job.finished - job.arrived,
        )
        for i, job in enumerate(jobs)
    ]
