"""The cycle: harvest what was served, decide whether another draft pays, find it or train it, judge it, hand it on."""

from __future__ import annotations

from prefect import flow

from flows.judging import judge
from tasks.approvals import find_proposal, start_promotion
from tasks.capture import set_capture_rate
from tasks.cost import weigh_cost
from tasks.cycle import finish_cycle, finished_cycle
from tasks.drift import detect_drift
from tasks.engine_check import check_engine
from tasks.harvest import harvest_spool
from tasks.pool import look_in_pool
from tasks.train import request_training
from tasks.version import pin_snapshot
from tide.domain import DriftReport, Proposal, Record, Snapshot, Verdict


class AdaptResult(Record):
    """What one cycle saw and did; the later parts are None when an earlier one said no."""

    snapshot: Snapshot
    drift: DriftReport
    candidate_branch: str | None = None
    verdict: Verdict | None = None
    promote_run: str | None = None
    """Id of the Prefect run that promotes the candidate, after an approval where policy wants one."""


@flow(name="adapt", log_prints=True)
def adapt(force: bool = False) -> AdaptResult:
    """One cycle. Ends early, and well, when there is nothing new, or retraining does not pay, or the candidate is not
    better.

    A draft that served before costs no training, so the pool is asked first, and the cost rule only when it has none.
    A cycle that was killed after its verdict finds it again: a second one would be a second attempt.

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
    set_capture_rate(drift)
    if drift.decision != "retrain" and not force:
        return AdaptResult(snapshot=snapshot, drift=drift)
    proposal: Proposal | None = None
    if not force:
        if branch := look_in_pool(snapshot, drift):
            proposal = find_proposal(branch) or judge(branch, snapshot.commit)
        if not _better(proposal):
            drift = weigh_cost(snapshot, drift)
    if not _better(proposal) and (force or drift.decision == "retrain"):
        branch = request_training(snapshot, drift)
        proposal = find_proposal(branch) or judge(branch, snapshot.commit)
    return AdaptResult(
        snapshot=snapshot,
        drift=drift,
        candidate_branch=proposal.branch if proposal else None,
        verdict=proposal.verdict if proposal else None,
        promote_run=start_promotion(proposal, snapshot.commit) if proposal and _better(proposal) else None,
    )


def _better(proposal: Proposal | None) -> bool:
    return proposal is not None and proposal.verdict.outcome == "promote"
