"""What a person is asked before a draft may serve, what they answered, and how it ended. All of it is in the ledger."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.decisions import Interval, Verdict
from tide.domain.identity import Digest, Record, Value
from tide.domain.signed import Signed


class Proposal(Value):
    """A candidate on its branch, the verdict on it, and the generation of ``serving.json`` it may take over from."""

    branch: str
    verdict: Verdict
    generation: int = Field(ge=0)


class Approval(Record):
    """A reviewer's word on one verdict in one run; signed with the reviewer's own key."""

    schema_version: Literal[1] = 1
    run: str
    """Id of the Prefect run that waits."""
    verdict: Digest
    candidate: str
    incumbent: str
    decision: Literal["approve", "refuse"]
    reviewer: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    at: float
    """Seconds since the epoch, by the reviewer's clock."""


class ApprovalRequest(Record):
    """A promotion that waits for people. Known by its digest, which answers and settlement name."""

    schema_version: Literal[1] = 1
    run: str
    branch: str
    verdict: Digest
    candidate: str
    incumbent: str
    gain: Interval
    """In acceptance length, as the verdict has it."""
    generation: int = Field(ge=0)
    """Of ``serving.json``; at another one the verdict is stale."""
    reasons: tuple[str, ...]
    """Why policy wants a person here."""
    approvers: int = Field(ge=1)
    asked_at: float
    expires_at: float


class ApprovalAnswer(Record):
    """One filled form, as it was given, and whether it counts."""

    schema_version: Literal[1] = 1
    request: Digest
    run: str
    round: int = Field(ge=0)
    """Forms of this request before this one."""
    decision: str
    reviewer: str
    reason: str
    signed: Signed | None = None
    """The reviewer's `Approval` in its envelope; None for a form filled in the web page: unverified."""
    problems: tuple[str, ...] = ()
    """Why it does not count; empty when it does."""
    at: float


class ApprovalSettlement(Record):
    """How a request ended. There is one a request; a second, with cause ``stale``, when an approval came to nothing."""

    schema_version: Literal[1] = 1
    request: Digest
    run: str
    branch: str
    verdict: Digest
    candidate: str
    outcome: Literal["approved", "refused"]
    cause: Literal["reviewers", "timeout", "superseded", "stale", "abandoned"]
    reasons: tuple[str, ...]
    approved_by: tuple[str, ...] = ()
    at: float
