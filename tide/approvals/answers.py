"""The rule of answers: whether a filled form counts, and what is wrong with it when it does not.

Pure: records, policy, clock and what was seen are arguments. Owns signatures, names and the binding to one verdict.
Knows nothing of the ledger, of Prefect, or of how a form looks; what answers amount to is in ``rules``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import ValidationError

from tide.domain import Approval, ApprovalAnswer, ApprovalRequest, Signed
from tide.errors import SignatureRefused
from tide.policies import ApprovalPolicy
from tide.signatures.signing import TrustedKeys

KEPT_CHARACTERS = 2000
"""Of each field of a form, in the ledger."""


@dataclass(frozen=True)
class Form:
    """What came back: four texts, none of them checked yet. ``signed`` is the JSON of a `Signed`, or empty."""

    decision: str = ""
    reviewer: str = ""
    reason: str = ""
    signed: str = ""


def examine(
    form: Form,
    request: ApprovalRequest,
    policy: ApprovalPolicy,
    earlier: Sequence[ApprovalAnswer],
    *,
    loopback: bool,
    now: float,
) -> ApprovalAnswer:
    """The answer that a form is, with what is wrong with it. A form may be anything: nothing is raised.

    Args:
        earlier: answers of this request before this one.
        loopback: Prefect's API, by which forms come, is reachable from this machine alone.
        now: when it is looked at, seconds since the epoch.
    """
    signed, problems = _envelope(form.signed), []
    if form.signed.strip() and signed is None:
        problems.append("signed: no signed record; `tide approve` and `tide refuse` make it")
    said = _said(signed) or form
    answer = ApprovalAnswer(
        request=request.digest(),
        run=request.run,
        round=len(earlier),
        decision=said.decision.strip()[:KEPT_CHARACTERS],
        reviewer=said.reviewer.strip()[:KEPT_CHARACTERS],
        reason=said.reason.strip()[:KEPT_CHARACTERS],
        signed=signed,
        at=now,
    )
    problems += _problems(answer, request, policy, loopback=loopback)
    if now >= request.expires_at:
        problems.append("timeout: it came after the time that policy gives")
    agreed = {a.reviewer for a in counting(earlier, request, policy, loopback=loopback) if a.decision == "approve"}
    if not problems and answer.decision == "approve" and answer.reviewer in agreed:
        problems.append(f"reviewer: {answer.reviewer} has approved already; the same person counts once")
    return answer.model_copy(update={"problems": tuple(problems)})


def is_loopback(url: str) -> bool:
    """Whether an address is of this machine and reachable from it alone."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def counting(
    answers: Iterable[ApprovalAnswer], request: ApprovalRequest, policy: ApprovalPolicy, *, loopback: bool
) -> list[ApprovalAnswer]:
    """Answers of a request that count under the policy of now; each signature is verified again."""
    mine = (a for a in answers if a.request == request.digest() and not a.problems)
    return [a for a in mine if not _problems(a, request, policy, loopback=loopback)]


def _problems(answer: ApprovalAnswer, request: ApprovalRequest, policy: ApprovalPolicy, *, loopback: bool) -> list[str]:
    """What is wrong with an answer in itself."""
    found = [
        f"{name}: {what}"
        for name, what, wrong in (
            ("decision", "approve or refuse is needed", answer.decision not in ("approve", "refuse")),
            ("reviewer", "a name is needed", not answer.reviewer),
            ("reason", "why is needed", not answer.reason),
        )
        if wrong
    ]
    if answer.signed is not None:
        return found + _signature_problems(answer, answer.signed, request, policy)
    if policy.unverified == "never" or (policy.unverified == "loopback" and not loopback):
        found.append(
            "signed: a form without a signature does not count here; `tide approve` signs "
            f"(policy: unverified {policy.unverified})"
        )
    return found


def _signature_problems(
    answer: ApprovalAnswer, signed: Signed, request: ApprovalRequest, policy: ApprovalPolicy
) -> list[str]:
    key = policy.reviewers.get(answer.reviewer)
    if key is None:
        return [f"reviewer: policy has no key of {answer.reviewer!r}; it goes under approval.reviewers"]
    try:
        approval = TrustedKeys([key]).open(signed, "approval", Approval)
    except SignatureRefused:
        return [f"signed: not by the key that policy has of {answer.reviewer}, or not this content"]
    bound = {
        "run": (approval.run, request.run),
        "verdict": (approval.verdict, request.verdict),
        "candidate": (approval.candidate, request.candidate),
        "incumbent": (approval.incumbent, request.incumbent),
        "decision": (approval.decision, answer.decision),
        "reason": (approval.reason.strip()[:KEPT_CHARACTERS], answer.reason),
    }
    return [f"signed: it is about another {name}" for name, (given, wanted) in bound.items() if given != wanted]


def _envelope(text: str) -> Signed | None:
    try:
        return Signed.model_validate_json(text)
    except ValidationError:
        return None


def _said(signed: Signed | None) -> Form | None:
    """What the signed content says, unverified as yet; the form beside it may say anything."""
    if signed is None:
        return None
    try:
        found = Approval.model_validate_json(signed.payload)
    except ValidationError:
        return None
    return Form(found.decision, found.reviewer, found.reason)
