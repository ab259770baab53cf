"""The rules of approvals: whether a person is needed, what their answers amount to, and how a request ends.

Pure: records, policy and clock are arguments. Owns the decisions and their reasons; whether a single answer counts is
in ``answers``. Knows nothing of the ledger or of Prefect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tide.acceptance import NO_DRAFT
from tide.approvals.answers import counting
from tide.domain import (
    ApprovalAnswer,
    ApprovalRequest,
    ApprovalSettlement,
    Proposal,
    Serving,
    ServingDraft,
    Verdict,
)
from tide.errors import SignatureRefused
from tide.policies import ApprovalPolicy

Cause = Literal["reviewers", "timeout", "superseded", "stale", "abandoned"]


def needed(verdict: Verdict, policy: ApprovalPolicy, *, first: bool) -> tuple[str, ...]:
    """Why a person must agree to this promotion; empty when nobody needs to.

    Args:
        first: no draft that was trained here serves yet.
    """
    if policy.mode == "auto":
        return ()
    if policy.mode == "manual":
        return ("manual: every promotion is approved by a person",)
    gain, found = verdict.overall.difference.estimate, []
    if policy.first_draft and first:
        found.append("first_draft: no draft that was trained here serves yet")
    if policy.gain_above is not None and gain > policy.gain_above:
        found.append(f"gain_above: a gain of {gain:+.3f} is above {policy.gain_above:+.3f}")
    if policy.gain_below is not None and gain < policy.gain_below:
        found.append(f"gain_below: a gain of {gain:+.3f} is below {policy.gain_below:+.3f}")
    return tuple(found)


def request_for(
    proposal: Proposal, run: str, reasons: Sequence[str], policy: ApprovalPolicy, now: float
) -> ApprovalRequest:
    """The request that a run makes for its proposal."""
    verdict = proposal.verdict
    return ApprovalRequest(
        run=run,
        branch=proposal.branch,
        verdict=verdict.digest(),
        candidate=verdict.candidate,
        incumbent=verdict.incumbent,
        gain=verdict.overall.difference,
        generation=proposal.generation,
        reasons=tuple(reasons),
        approvers=policy.approvers,
        asked_at=now,
        expires_at=now + policy.timeout_s,
    )


def generation_for(verdict: Verdict, serving: Serving, policy: str, spent: Iterable[str]) -> int | None:
    """The generation that a verdict found on a branch may take over from; None when the candidate must be judged anew.

    Args:
        policy: digest of the policy of now; under another one the verdict might be another.
        spent: digests of verdicts that were refused by people or came to nothing.
    """
    digest, stable = verdict.digest(), serving.stable
    if stable == ServingDraft(digest=verdict.candidate, verdict=digest):
        return serving.generation - 1  # a killed run got as far as its merge: the rollout goes on where it was
    current = verdict.incumbent == (stable.digest if stable else NO_DRAFT) and verdict.policy == policy
    return serving.generation if current and digest not in spent else None


@dataclass(frozen=True)
class Weighed:
    """What the answers amount to."""

    state: Literal["approved", "refused", "wait"]
    reasons: tuple[str, ...]
    approved_by: tuple[str, ...]


def weigh(
    request: ApprovalRequest, answers: Sequence[ApprovalAnswer], policy: ApprovalPolicy, *, loopback: bool
) -> Weighed:
    """What the answers amount to under the policy of now. Signatures are verified again: the ledger may be written to.

    The number of approvers is the greater one of when it was asked and of now.
    """
    found = counting(answers, request, policy, loopback=loopback)
    refusals = [a for a in found if a.decision == "refuse"]
    names = tuple(dict.fromkeys(a.reviewer for a in found if a.decision == "approve"))
    if refusals:
        return Weighed("refused", tuple(f"refused by {_who(a)}: {a.reason}" for a in refusals), names)
    wanted = max(request.approvers, policy.approvers)
    if len(names) < wanted:
        return Weighed("wait", (f"{len(names)} of {wanted} approvals",), names)
    return Weighed("approved", tuple(f"approved by {_who(a)}: {a.reason}" for a in found), names)


def require_approved(
    request: ApprovalRequest, answers: Sequence[ApprovalAnswer], policy: ApprovalPolicy, *, loopback: bool
) -> None:
    """Hold a recorded approval against the answers: who may write to lakeFS may write that, but not the signatures.

    Raises:
        SignatureRefused: the answers do not amount to an approval.
    """
    found = weigh(request, answers, policy, loopback=loopback)
    if found.state != "approved":
        raise SignatureRefused(
            f"the ledger says that run {request.run} is approved, its answers say {found.state}: "
            f"{'; '.join(found.reasons)}; look at the log of the ledger branch, then run the promotion again"
        )


def conclude(
    request: ApprovalRequest,
    requests: Sequence[ApprovalRequest],
    answers: Sequence[ApprovalAnswer],
    policy: ApprovalPolicy,
    *,
    loopback: bool,
    now: float,
) -> ApprovalSettlement | None:
    """How the request ends, or None while it waits. One that a newer request of another run took over from never waits.

    Args:
        requests: all of the service.
        answers: those of this request.
    """
    if newer := [r for r in requests if r.run != request.run and r.asked_at > request.asked_at]:
        last = max(newer, key=lambda r: r.asked_at)
        return refusal(request, "superseded", [superseded_by(last.run, last.verdict)], now)
    found = weigh(request, answers, policy, loopback=loopback)
    if found.state == "refused":
        return refusal(request, "reviewers", found.reasons, now)
    if found.state == "approved":
        return _settlement(request, "approved", "reviewers", found.reasons, now, found.approved_by)
    if now >= request.expires_at:
        reason = f"timeout: {found.reasons[0]} in {request.expires_at - request.asked_at:.0f} s"
        return refusal(request, "timeout", [reason], now)
    return None


def refusal(request: ApprovalRequest, cause: Cause, reasons: Sequence[str], now: float) -> ApprovalSettlement:
    """How a request ends without a promotion."""
    return _settlement(request, "refused", cause, tuple(reasons), now)


def superseded_by(run: str, verdict: str) -> str:
    """The reason of a request that a newer promotion took over from."""
    return f"superseded: run {run} has a newer verdict, {verdict[:12]}"


def _who(answer: ApprovalAnswer) -> str:
    return answer.reviewer if answer.signed else f"{answer.reviewer} (unverified)"


def _settlement(
    request: ApprovalRequest,
    outcome: Literal["approved", "refused"],
    cause: Cause,
    reasons: tuple[str, ...],
    now: float,
    approved_by: tuple[str, ...] = (),
) -> ApprovalSettlement:
    return ApprovalSettlement(
        request=request.digest(),
        run=request.run,
        branch=request.branch,
        verdict=request.verdict,
        candidate=request.candidate,
        outcome=outcome,
        cause=cause,
        reasons=reasons,
        approved_by=approved_by,
        at=now,
    )
