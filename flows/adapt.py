"""The cycle: harvest what was served, decide whether another draft pays, find it or train it, judge, promote."""

from __future__ import annotations

from prefect import flow

from flows.promote import promote
from tasks.cost import weigh_cost
from tasks.cycle import finish_cycle, finished_cycle
from tasks.drift import detect_drift
from tasks.engine_check import check_engine
from tasks.harvest import harvest_spool
from tasks.pool import look_in_pool
from tasks.train import request_training
from tasks.version import pin_snapshot
from tide.domain import DriftReport, Promotion, Record, Snapshot, Verdict


class AdaptResult(Record):
    """What one cycle saw and did; the later parts are None when an earlier one said no."""

    snapshot: Snapshot
    drift: DriftReport
    candidate_branch: str | None = None
    verdict: Verdict | None = None
    promotion: Promotion | None = None


@flow(name="adapt", log_prints=True)
def adapt(force: bool = False) -> AdaptResult:
    """One cycle. Ends early, and well, when there is nothing new, or retraining does not pay, or the candidate is not
    better.

    A draft that served before costs no training, so the pool is asked first, and the cost rule only when it has none.

    Args:
        force: train, whatever the drift gate, the pool and the cost rule say; the promotion gate decides all the same.
    """
    harvest_spool()
    snapshot = pin_snapshot()
    if not force and (earlier := finished_cycle(snapshot)):
        return AdaptResult(snapshot=snapshot, drift=earlier.drift, candidate_branch=earlier.candidate_branch)
    result = _cycle(snapshot, force)
    finish_cycle(snapshot, result.drift, result.candidate_branch)
    return result


def _cycle(snapshot: Snapshot, force: bool) -> AdaptResult:
    drift = check_engine(snapshot, detect_drift(snapshot))
    if drift.decision != "retrain" and not force:
        return AdaptResult(snapshot=snapshot, drift=drift)
    branch, verdict, promotion = None, None, None
    if not force:
        if branch := look_in_pool(snapshot, drift):
            verdict, promotion = promote(branch, snapshot.commit)
        if promotion is None:
            drift = weigh_cost(snapshot, drift)
    if promotion is None and (force or drift.decision == "retrain"):
        branch = request_training(snapshot, drift)
        verdict, promotion = promote(branch, snapshot.commit)
    return AdaptResult(snapshot=snapshot, drift=drift, candidate_branch=branch, verdict=verdict, promotion=promotion)
