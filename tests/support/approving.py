"""Reviewers of the tests with their keys, a promotion that waits for them, and forms as they fill them in."""

from __future__ import annotations

from typing import Any

from tests.support.signed import verdict_on
from tide.approvals import rules as approval_rules
from tide.approvals.answers import Form
from tide.config import ApprovalPolicy
from tide.domain import Approval, ApprovalRequest, Proposal
from tide.signatures.signing import SigningKey

KEYS = {name: SigningKey.generate() for name in ("ada", "bob")}
POLICY = ApprovalPolicy(mode="manual", reviewers={name: key.public for name, key in KEYS.items()}, timeout_s=600.0)
NOW = 1_796_040_000.0
RUN = "0b6f1c1e-7a53-4a0e-9a51-0f6a5d1f2c33"
VERDICT = verdict_on("b" * 64, "a" * 64)
PROPOSAL = Proposal(branch="candidate-b", verdict=VERDICT, generation=1)
REQUEST = approval_rules.request_for(PROPOSAL, RUN, ["for a test"], POLICY, NOW)


def form(**changes: str) -> Form:
    """A form without a signature, of somebody."""
    return Form(**({"decision": "approve", "reviewer": "ada", "reason": "it is plausible"} | changes))


def unsigned(reviewer: str, decision: str = "approve") -> Form:
    """A form as the web page sends it."""
    return form(reviewer=reviewer, decision=decision)


def signed_form(
    reviewer: str, *, request: ApprovalRequest = REQUEST, key: SigningKey | None = None, **changes: Any
) -> Form:
    """A form as `tide approve` sends it; ``changes`` replace fields of what is signed."""
    fields: dict[str, Any] = {
        "run": request.run,
        "verdict": request.verdict,
        "candidate": request.candidate,
        "incumbent": request.incumbent,
        "decision": "approve",
        "reviewer": reviewer,
        "reason": "it is plausible",
        "at": NOW,
    }
    said = Approval(**(fields | changes))
    signed = (key or KEYS[reviewer]).sign("approval", said)
    return Form(said.decision, said.reviewer, said.reason, signed.to_json())
