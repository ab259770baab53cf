"""The promotion: a verdict that holds or a new one, the people that policy wants to hear, and the rollout."""

from __future__ import annotations

from prefect import flow

from flows.judging import judge
from tasks.approvals import await_approval, expire_approvals, find_proposal, void_approval
from tasks.promote import roll_out
from tide.domain import ApprovalSettlement, CanaryRefusal, Promotion, Record, Verdict
from tide.errors import Conflict

MAX_RACES = 3


class PromoteResult(Record):
    """The verdict, what people said where they were asked, and the promotion, or why the canary refused it."""

    verdict: Verdict
    approval: ApprovalSettlement | None = None
    refusal: CanaryRefusal | None = None
    promotion: Promotion | None = None


@flow(name="promote", log_prints=True)
def promote(branch: str, states_ref: str = "main", dry_run: bool = False) -> PromoteResult:
    """Promote the candidate on ``branch`` when its verdict, and who must approve, say so. Refusal is a normal result.

    While people are asked the run is suspended; resumed, it starts here again and goes on with the verdict it asked
    about. A promotion that finds another draft in serving than its verdict was made against has a stale verdict, and a
    stale approval: the candidate is judged again, and approved anew.

    Args:
        branch: branch of the drafts repository that holds the candidate.
        states_ref: states commit whose gate requests it is judged on.
        dry_run: stop after the verdict.

    Raises:
        Conflict: the race was lost again and again.
    """
    expire_approvals()
    for _ in range(MAX_RACES):
        proposal = find_proposal(branch) or judge(branch, states_ref)
        verdict = proposal.verdict
        if verdict.outcome != "promote" or dry_run:
            return PromoteResult(verdict=verdict)
        approval = await_approval(proposal)
        if approval is not None and approval.outcome == "refused":
            return PromoteResult(verdict=verdict, approval=approval)
        outcome = roll_out(branch, verdict.candidate, proposal.generation)
        if isinstance(outcome, CanaryRefusal):
            return PromoteResult(verdict=verdict, approval=approval, refusal=outcome)
        if outcome is not None:
            return PromoteResult(verdict=verdict, approval=approval, promotion=outcome)
        if approval is not None:
            void_approval(approval)
    raise Conflict(f"{branch}: another promotion was faster {MAX_RACES} times; run the flow again when they are done")
