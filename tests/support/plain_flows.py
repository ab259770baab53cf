"""Flows that do nothing but what Prefect is asked about: fail once, wait for a person, take their time."""

from __future__ import annotations

import time
from pathlib import Path

from prefect import flow
from prefect.flow_runs import suspend_flow_run


@flow(name="fails-once", retries=1, retry_delay_seconds=0)
def fails_once(marker: str) -> None:
    """Fails at the first attempt."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        raise RuntimeError("the first attempt fails")


@flow(name="waits")
def waits(timeout_s: int = 3600) -> None:
    """Suspends itself, as a promotion does that waits for a person."""
    suspend_flow_run(timeout=timeout_s)


@flow(name="sleeps")
def sleeps(seconds: float) -> None:
    """Healthy, and long."""
    time.sleep(seconds)
