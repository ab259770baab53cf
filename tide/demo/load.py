"""Closed-loop load: a fixed number of requests in flight, every answer kept.

Owns the threads and the clock of a load. Knows nothing of which prompts make sense or what is done with the figures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tide.demo.traffic import Prompt
from tide.domain import Record
from tide.engine.base import Engine, Generation
from tide.errors import EngineError


class Served(Record):
    """One answer and when it ended."""

    at: float
    """Seconds since the epoch."""
    workload: str
    generation: Generation


class LoadResult(Record):
    """What a load did."""

    served: tuple[Served, ...]
    wall_s: float
    failed: int

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all answers."""
        return sum(s.generation.completion_tokens for s in self.served)

    @property
    def output_tokens_per_s(self) -> float:
        """Output throughput of the whole load."""
        return self.output_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Pooled over the answers that had verify steps; None when none had."""
        return pooled(self.served)


def pooled(served: Iterable[Served]) -> float | None:
    """Acceptance length: tokens over verify steps, summed before dividing."""
    measured = [s.generation for s in served if s.generation.verify_steps]
    steps = sum(g.verify_steps or 0 for g in measured)
    return sum(g.completion_tokens for g in measured) / steps if steps else None


def serve(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    workload: str,
    concurrency: int,
    max_new_tokens: int,
    ignore_eos: bool = False,
    on_done: Callable[[Served], None] = lambda _: None,
) -> LoadResult:
    """Send every prompt once, ``concurrency`` at a time. A failed request is counted, the load goes on.

    Raises:
        EngineError: every request failed; the last reason.
    """
    failures: list[EngineError] = []

    def one(prompt: Prompt) -> Served | None:
        try:
            generation = engine.generate(
                prompt.messages,
                max_new_tokens=max_new_tokens,
                conversation=prompt.conversation,
                slice=prompt.slice,
                ignore_eos=ignore_eos,
            )
        except EngineError as error:
            failures.append(error)
            return None
        done = Served(at=time.time(), workload=workload, generation=generation)
        on_done(done)
        return done

    started = time.monotonic()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="load") as pool:
        answers = list(pool.map(one, prompts))
    if prompts and len(failures) == len(prompts):
        raise failures[-1]
    served = tuple(a for a in answers if a is not None)
    return LoadResult(served=served, wall_s=time.monotonic() - started, failed=len(failures))


class BackgroundLoad:
    """Traffic that goes on while a cycle runs: a trickle, or continuous when asked to press.

    Training shares two cores with the service here, so the trickle sends one request a pause; ``press`` removes the
    pause for the time of a swap.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], *, workload: str, max_new_tokens: int, pause_s: float
    ) -> None:
        self._engine, self._prompts, self._workload = engine, prompts, workload
        self._max_new_tokens, self._pause_s = max_new_tokens, pause_s
        self._stop, self._press = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="background-load", daemon=True)
        self.served: list[Served] = []
        self.failed = 0

    def __enter__(self) -> BackgroundLoad:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._press.set()
        self._thread.join(timeout=120)

    def press(self) -> None:
        """From now on send without a pause, two in flight."""
        self._press.set()

    def _run(self) -> None:
        at = 0
        while not self._stop.is_set() and self._prompts:
            count = 2 if self._press.is_set() else 1
            batch = [self._prompts[(at + i) % len(self._prompts)] for i in range(count)]
            at += count
            try:
                done = serve(
                    self._engine,
                    batch,
                    workload=self._workload,
                    concurrency=count,
                    max_new_tokens=self._max_new_tokens,
                )
                self.served += done.served
                self.failed += done.failed
            except EngineError:
                self.failed += count
            if not self._press.is_set():
                self._press.wait(self._pause_s)
