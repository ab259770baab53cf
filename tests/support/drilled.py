"""The real flows as a drill deploys them: stand-ins behind three ports, and each step boundary is told and can be held.

A worker's process asks this module for one flow in place of flows.*, and only that one is imported, as in service. Each
stage appends ``before NAME`` and ``after NAME`` to ``<home>/boundaries.log``. While ``<home>/hold_at`` names a
boundary, whoever reaches it stays there, to be killed.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect.flows import Flow
from prefect.tasks import Task

from tests.support import standins
from tests.support.drilled_names import HOLD, LOG
from tide import wiring

HELD_S = 300.0
"""A hold that nobody ends is over by itself."""


def __getattr__(name: str) -> Flow[Any, Any]:
    """The flow of ``flows.<name>``, drilled."""
    if name.startswith("_"):
        raise AttributeError(name)
    found: Flow[Any, Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    standins.install()
    if "TIDE_HOME" in os.environ and Path(os.environ["TIDE_HOME"]).is_dir():
        for stage in _stages().values():
            if not hasattr(stage.fn, "__wrapped__"):
                stage.fn = _told(stage.name, stage.fn)
    return found


def _tell(boundary: str) -> None:
    home = wiring.settings().home
    hold = home / HOLD
    held = hold.exists() and hold.read_text() == boundary
    with (home / LOG).open("a") as file:
        file.write(f"{os.getpid()} {'held ' if held else ''}{boundary}\n")
    deadline = time.monotonic() + HELD_S
    while held and hold.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _told(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def told(*args: Any, **options: Any) -> Any:
        _tell(f"before {name}")
        result = work(*args, **options)
        _tell(f"after {name}")
        return result

    return told


def _stages() -> dict[int, Task[Any, Any]]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("tasks.")]
    return {id(v): v for module in modules for v in vars(module).values() if isinstance(v, Task)}
