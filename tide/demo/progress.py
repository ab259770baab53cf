"""Progress that is visible all the time: the step of the story, what it is doing, and a time to go.

Owns the console. Knows nothing of what the steps are.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

_DONE = re.compile(r"(\d+)/(\d+)")
_TELLING = 0.05
"""Share of a step that must be done before its own pace counts for more than the plan."""


class Progress:
    """A plan of steps with expected seconds; prints a line for each event, and while a step runs.

    Args:
        plan: (name, expected seconds at reference speed) of every step, in order.
        clock: seconds.
    """

    def __init__(self, plan: Sequence[tuple[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._clock = dict(plan), clock
        self._left = sum(self._plan.values())
        self._started = clock()
        self._scale = 1.0
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self.took: dict[str, float] = {}
        """Seconds of each step that has ended."""

    def say(self, line: str) -> None:
        """One line that stays."""
        elapsed = self._clock() - self._started
        with self._lock:
            self._console.print(f"[{int(elapsed // 60):02d}:{int(elapsed % 60):02d}] {line}", markup=False)

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """A step of the plan; yields a function that reports what it is doing now.

        A report that says how much is done ("17/320 requests") corrects the time to go.
        """
        expected = self._plan[name]
        began = self._clock()
        self.say(f"== {name} (about {_minutes(self._left * self._scale)} to go in all)")
        last = [began]

        def detail(text: str) -> None:
            now = self._clock()
            if now - last[0] >= 5.0:
                last[0] = now
                self.say(f"   {text}  [about {_minutes(self._to_go(expected, now - began, text))} to go]")

        yield detail
        took = self._clock() - began
        self.took[name] = took
        self._left -= expected
        if expected >= 30.0:  # short steps say little about the machine's speed
            self._scale = self._corrected(took / expected)
        self.say(f"   {name}: done in {took:.0f} s")

    def _to_go(self, expected: float, took: float, text: str) -> float:
        """Seconds to the end of the story, from inside a step."""
        found = _DONE.search(text)
        done = int(found[1]) / max(1, int(found[2])) if found else 0.0
        if done < _TELLING:
            return max(0.0, self._left * self._scale - took)
        whole = took / done
        return whole - took + (self._left - expected) * self._corrected(whole / expected)

    def _corrected(self, pace: float) -> float:
        return 0.5 * self._scale + 0.5 * max(0.2, pace)


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"
