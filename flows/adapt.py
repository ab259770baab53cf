"""The cycle: harvest what was served, decide whether retraining pays, train, judge, promote."""

from __future__ import annotations

from prefect import flow

from flows.promote import promote
from tasks.drift import detect_drift
from tasks.engine_check import check_engine
from tasks.harvest import harvest_spool
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
    """One cycle. Ends early, and well, when retraining does not pay or the candidate is not better.

    Args:
        force: train even when the drift gate says that it does not pay; the promotion gate decides all the same.
    """
    harvest_spool()
    snapshot = pin_snapshot()
    drift = check_engine(snapshot, detect_drift(snapshot))
    if drift.decision != "retrain" and not force:
        return AdaptResult(snapshot=snapshot, drift=drift)
    branch = request_training(snapshot, drift)
    verdict, promotion = promote(branch, snapshot.commit)
    return AdaptResult(snapshot=snapshot, drift=drift, candidate_branch=branch, verdict=verdict, promotion=promotion)
