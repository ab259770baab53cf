"""A store whose client dies at one chosen call, before or after the call took effect. For tests of crash safety."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tide.store.base import Store


class Crash(BaseException):
    """The process ended here: no handler of the code under test may catch it."""


class CrashPoint:
    """Counts the steps of everything that shares it, and ends the process at the chosen one."""

    def __init__(self, at: int | None = None, *, after: bool = False) -> None:
        self.at, self.after, self.steps = at, after, 0

    def step(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do one step, unless this is where it ends."""
        mine = self.steps == self.at
        self.steps += 1
        if mine and not self.after:
            raise Crash(f"before step {self.at}")
        try:
            result = action(*args, **kwargs)
            return iter(list(result)) if inspect.isgenerator(result) else result
        finally:
            if mine:  # whatever the answer was, nobody lived to hear it
                raise Crash(f"after step {self.at}")


def crashing(store: Store, point: CrashPoint) -> Store:
    """The store with every method a step of the crash point."""
    methods = {
        name: (lambda self, *args, _name=name, **kwargs: point.step(getattr(store, _name), *args, **kwargs))
        for name in Store.__abstractmethods__
    }
    return type("CrashingStore", (Store,), methods)()
