"""Keeps the tap's failures away from the scheduler, and measures what it costs.

SGLang's hooks have no guard of their own: an exception that leaves one ends the engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Guarded(Protocol):
    """What has guarded methods."""

    enabled: bool
    cpu_s: float
    """CPU seconds spent in them so far."""

    def switch_off(self, where: str, error: BaseException | None) -> None:
        """Stop for good."""


G = TypeVar("G", bound=Guarded)


def guarded(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R | None]:
    """Keep any failure of the tap away from the scheduler: switch the tap off, count, log once."""

    @functools.wraps(method)
    def wrapper(tap: G, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not tap.enabled:
            return None
        started = time.thread_time()
        try:
            return method(tap, *args, **kwargs)
        # Process edge: SGLang's hooks have no guard, an exception that leaves one ends the engine.
        except Exception as error:  # noqa: BLE001
            tap.switch_off(method.__name__, error)
            return None
        finally:
            tap.cpu_s += time.thread_time() - started

    return wrapper
