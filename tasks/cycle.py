"""Cycle: has an earlier one worked through these very states, and the record that this one has."""

from __future__ import annotations

from prefect import get_run_logger

from tasks.stage import stage
from tide import cycles, wiring
from tide.cycles import Cycle
from tide.domain import DriftReport, Snapshot


@stage("look for a finished cycle")
def finished_cycle(snapshot: Snapshot) -> Cycle | None:
    """The cycle that came to its end on these states under this policy; None when they are new."""
    config = wiring.settings()
    found = cycles.finished(wiring.store(config), config.drafts_repository, snapshot.commit, config.policy().digest())
    if found:
        get_run_logger().info("no states since the last finished cycle (%s): nothing to do", snapshot.commit[:12])
    return found


@stage("finish cycle")
def finish_cycle(snapshot: Snapshot, drift: DriftReport, branch: str | None) -> None:
    """Record the cycle's end in the ledger."""
    config = wiring.settings()
    cycle = Cycle(states_commit=snapshot.commit, policy=config.policy().digest(), drift=drift, candidate_branch=branch)
    cycles.finish(wiring.store(config), config.drafts_repository, cycle)
