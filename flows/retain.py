"""Retention: windows of states that policy does not keep leave main."""

from __future__ import annotations

from prefect import flow

from tasks.retain import plan_retention, remove_windows
from tide.states.retention import RetentionPlan


@flow(name="retain", log_prints=True)
def retain(dry_run: bool = False) -> RetentionPlan:
    """Keep what the policy's ``retention`` keeps, and what live drafts were trained on.

    Args:
        dry_run: stop after the table of what would go.
    """
    plan = plan_retention()
    if not dry_run:
        remove_windows(plan)
    return plan
