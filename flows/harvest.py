"""Harvest alone: closed windows of the spool become one commit each on the states repository."""

from __future__ import annotations

from prefect import flow

from tasks.harvest import harvest_spool
from tide.domain import HarvestResult


@flow(name="harvest", log_prints=True)
def harvest() -> HarvestResult:
    """Harvest every closed window of this host's spool."""
    return harvest_spool()
