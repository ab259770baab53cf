"""Reconcile: each stage looks for one kind of thing that a dead process leaves behind, mends it, and says what it did.

Every repair is safe to repeat. What is taken for dead, and when, is decided by `tide.recovery.rules`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.approvals import expire_approvals
from tasks.runs import RunServer, current_run, server
from tasks.serve import reconcile_replicas
from tasks.stage import stage
from tide import wiring
from tide.lineage import ledger
from tide.recovery import branches, ownership
from tide.recovery import rules as recovery
from tide.recovery.ownership import Owner
from tide.recovery.rules import Patience, ReconcileReport, Repair, RunView, SlotView
from tide.serving.replicas import describe

KIND = "reconcile"
BETWEEN_READINGS_S = 2.0


@stage("look for dead runs")
def mend_runs(patience: Patience, dry_run: bool) -> list[Repair]:
    """Runs that hold a slot and show no life are marked crashed. A silent one is looked at twice."""
    with server() as prefect:
        suspects = [run for run in prefect.at_work() if recovery.stuck(run, time.time(), patience)]
        if any(run.state != "PENDING" for run in suspects):
            time.sleep(patience.second_look_s)
        return [repair for run in suspects for repair in _mend_run(prefect, run, patience, dry_run)]


def _mend_run(prefect: RunServer, run: RunView, patience: Patience, dry_run: bool) -> Iterator[Repair]:
    if why := recovery.still_stuck(run, prefect.run(run.id), time.time(), patience):
        crashed = not dry_run and prefect.crash(run, why)
        yield _repair("run", f"{run.flow} {run.name}", why, crashed)


@stage("look for leaked slots")
def mend_slots(dry_run: bool) -> list[Repair]:
    """Concurrency slots that no run holds are given back: else every later run would be cancelled for want of one."""
    with server() as prefect:
        first = {slot.deployment: slot for slot in prefect.slots() if slot.held > len(slot.runs)}
        if not first:
            return []
        time.sleep(BETWEEN_READINGS_S)
        again = {slot.deployment: slot for slot in prefect.slots()}
        return [r for name in sorted(first) for r in _mend_slot(prefect, first[name], again.get(name), dry_run)]


def _mend_slot(prefect: RunServer, first: SlotView, again: SlotView | None, dry_run: bool) -> Iterator[Repair]:
    if again is None or not (count := recovery.leaked(first, again)):
        return
    if not dry_run:
        prefect.free(again, count)
    why = f"{again.held} slots are taken, and {len(again.runs)} runs are at work"
    yield _repair("slot", again.deployment, why, not dry_run)


@stage("look for orphaned training")
def end_orphans(patience: Patience, dry_run: bool) -> list[Repair]:
    """Training processes on this host whose flow is dead, or whose run has ended, are ended as a group."""
    found = []
    with server() as prefect:
        for folder, owner in _training():
            if count := len(ownership.members(owner)):
                run = prefect.run(owner.flow_run) if owner.flow_run else None
                alive = ownership.flow_alive(owner)
                if why := recovery.orphaned(alive, run, time.time(), patience):
                    if not dry_run:
                        ownership.end_members(owner)
                    found.append(_repair("process", folder.name, f"{count} training processes: {why}", not dry_run))
    return found


@stage("look for old scratch")
def tidy_scratch(patience: Patience, dry_run: bool) -> list[Repair]:
    """Folders of training runs that died, once nobody will look into them any more: they hold the run's samples."""
    found = []
    for folder in _folders():
        alive, count, age = _use_of(folder)
        if recovery.discarded(alive, count, age, patience):
            if not dry_run:
                shutil.rmtree(folder)
            why = f"its run died, and it is {age / 3600:.1f} h old"
            found.append(_repair("scratch", folder.name, why, not dry_run))
    return found


def _use_of(folder: Path) -> tuple[bool, int, float]:
    """Whether the flow of a training folder may live, how many processes use it, and its age in seconds."""
    owner = ownership.read_owner(folder)
    if owner is None:
        return False, len(ownership.users(folder)), time.time() - folder.stat().st_mtime
    alive = ownership.flow_alive(owner) or not ownership.is_here(owner)
    return alive, len(ownership.members(owner)), time.time() - owner.at


def _training() -> Iterator[tuple[Path, Owner]]:
    """Folders of training runs on this host that say whose they are."""
    for folder in _folders():
        owner = ownership.read_owner(folder)
        if owner is not None and ownership.is_here(owner):
            yield folder, owner


def _folders() -> list[Path]:
    return sorted(path for path in (wiring.settings().home / "train").glob("*") if path.is_dir())


@stage("look for half-made branches")
def mend_branches(dry_run: bool) -> list[Repair]:
    """Branches that dead runs left: what holds nothing that main lacks goes, the rest waits for its stage."""
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    with server() as prefect:
        busy = recovery.busy_flows(prefect.at_work())
    found = []
    for left in branches.find(store, config.states_repository, drafts, busy):
        gone = left.done and not dry_run and branches.remove(store, left)
        found.append(_repair("branch", f"{left.repository}@{left.branch}", left.why, gone))
    if "promote" not in busy and not dry_run and branches.finish_serving(store, drafts):
        found.append(_repair("branch", drafts, "the generation in serving had no tag", True))
    return found


@stage("look at what waits for people")
def mend_approvals(dry_run: bool) -> list[Repair]:
    """Promotions that nobody decided in time, or whose run has ended, are refused, and their runs resumed to end."""
    if dry_run or wiring.settings().drafts_repository not in wiring.store(wiring.settings()).repositories():
        return []
    return [_repair("approval", ended.run, "; ".join(ended.reasons), True) for ended in expire_approvals.fn()]


@stage("look at the replicas")
def mend_replicas(dry_run: bool) -> list[Repair]:
    """Every replica serves what ``serving.json`` says. Skipped while a promotion is at work, which sees to it."""
    config = wiring.settings()
    with server() as prefect:
        busy = recovery.busy_flows(prefect.at_work())
    if busy & {"promote", "rollback"} or dry_run or config.drafts_repository not in wiring.store(config).repositories():
        return []
    swaps = reconcile_replicas.fn()
    return [_repair("replica", swap.replica, describe(swap), not swap.out_of_service) for swap in swaps]


@stage("record reconcile")
def record_reconcile(repairs: list[Repair]) -> ReconcileReport:
    """Show what was found; the ledger gets it when something was mended or could not be."""
    config = wiring.settings()
    report = ReconcileReport(at=time.time(), run=current_run() or "", repairs=tuple(repairs))
    summary = f"{report.mended} mended, {len(repairs) - report.mended} not"
    create_markdown_artifact(key="reconcile", markdown=recovery.to_markdown(report), description=summary)
    for repair in repairs:
        get_run_logger().warning("%s %s: %s: %s", repair.kind, repair.subject, repair.found, repair.outcome)
    if any(repair.outcome != "left" for repair in repairs):
        ledger.append(wiring.store(config), config.drafts_repository, KIND, report)
    return report


def _repair(kind: str, subject: str, found: str, mended: bool) -> Repair:
    return Repair.model_validate(
        {"kind": kind, "subject": subject, "found": found, "outcome": "mended" if mended else "left"}
    )
