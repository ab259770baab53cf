"""Progress that is visible all the time: the step of the story, what it is doing, and a time to go.

Owns the console. Knows nothing of what the steps are.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """A plan of steps with expected seconds; prints a line for each event, a status line while one runs.

    Args:
        plan: (name, expected seconds at reference speed) of every step, in order.
    """

    def __init__(self, plan: Sequence[tuple[str, float]]) -> None:
        self._plan = dict(plan)
        self._left = sum(self._plan.values())
        self._started = time.monotonic()
        self._scale = 1.0
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """One line that stays."""
        elapsed = time.monotonic() - self._started
        with self._lock:
            self._console.print(f"[{int(elapsed // 60):02d}:{int(elapsed % 60):02d}] {line}", markup=False)

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """A step of the plan; yields a function that reports what it is doing now."""
        expected = self._plan[name]
        began = time.monotonic()
        self.say(f"== {name} (about {self._minutes(self._left * self._scale)} to go in all)")
        last = [0.0]

        def detail(text: str) -> None:
            now = time.monotonic()
            if now - last[0] >= 5.0:
                last[0] = now
                left = max(0.0, self._left * self._scale - (now - began))
                self.say(f"   {text}  [about {self._minutes(left)} to go]")

        yield detail
        took = time.monotonic() - began
        self._left -= expected
        if expected >= 30.0:  # short steps say little about the machine's speed
            self._scale = 0.5 * self._scale + 0.5 * max(0.2, took / expected)
        self.say(f"   {name}: done in {took:.0f} s")

    @staticmethod
    def _minutes(seconds: float) -> str:
        return f"{max(1, round(seconds / 60))} min"
