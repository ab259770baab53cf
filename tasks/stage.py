"""What every stage shares: a Prefect task named after it, that retries transient failures only.

Owns the retry rule and where results of one cycle are kept. Knows nothing of what stages do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from tide import wiring
from tide.errors import TideError

P = ParamSpec("P")
R = TypeVar("R")


def is_transient(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry only what may heal by itself; bad input, refusals and conflicts never do."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, TideError) and error.transient


def stage(name: str, **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A task of this name: three retries, 2 to 8 s apart with jitter, for transient errors only."""
    return task(
        name=name,
        retries=3,
        retry_delay_seconds=exponential_backoff(2),
        retry_jitter_factor=0.5,
        retry_condition_fn=is_transient,
        persist_result=False,
        **options,
    )


def cache_folder(kind: str) -> Path:
    """Local folder for downloads, by digest, reused between runs."""
    folder = wiring.settings().home / "cache" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder
