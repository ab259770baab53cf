"""Repair: what processes that died have left behind is found and put right, whatever it is, on a schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prefect import flow

from tasks.reconcile import (
    end_orphans,
    mend_approvals,
    mend_branches,
    mend_replicas,
    mend_runs,
    mend_slots,
    record_reconcile,
    tidy_scratch,
)
from tide.errors import ServiceError
from tide.recovery.rules import Patience, ReconcileReport, Repair


@flow(name="reconcile", log_prints=True)
def reconcile(patience: Patience | None = None, dry_run: bool = False) -> ReconcileReport:
    """Look for dead runs, leaked slots, orphaned training, half-made branches and replicas that differ; mend them.

    One check that fails does not keep the others from their work.

    Args:
        patience: how long something may stand still before it is taken for dead; the usual when not given.
        dry_run: only report.

    Raises:
        ServiceError: a check failed; the others were made, and are recorded.
    """
    given = patience or Patience()
    # Runs first: a dead one holds a slot, owns processes, and makes its branches look used.
    checks: dict[str, Callable[..., Any]] = {
        "runs": partial(mend_runs, given, dry_run),
        "slots": partial(mend_slots, dry_run),
        "processes": partial(end_orphans, given, dry_run),
        "scratch": partial(tidy_scratch, given, dry_run),
        "branches": partial(mend_branches, dry_run),
        "replicas": partial(mend_replicas, dry_run),
        "approvals": partial(mend_approvals, dry_run),
    }
    repairs = [repair for name, check in checks.items() for repair in _made(name, check)]
    report = record_reconcile(repairs)
    if failed := [repair for repair in repairs if repair.outcome == "failed"]:
        raise ServiceError("; ".join(f"{repair.subject}: {repair.found}" for repair in failed))
    return report


def _made(name: str, check: Callable[..., Any]) -> list[Repair]:
    state = check(return_state=True)
    if state.is_completed():
        found: list[Repair] = state.result()
        return found
    return [Repair(kind="check", subject=name, found=str(state.message or state.name), outcome="failed")]
