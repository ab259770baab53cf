"""Approvals as steps over the ledger: what was asked, what was answered, how it ended, and what still waits.

Owns the kinds of the four records, and that a request is settled once whoever comes first. Works over the Store port.
Knows nothing of Prefect; the rules are in ``rules`` and ``answers``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tide.approvals import rules as approval_rules
from tide.domain import ApprovalAnswer, ApprovalRequest, ApprovalSettlement, ServingDraft, Value, Verdict
from tide.errors import AlreadyExists, ApprovalRefused, NothingToCommit
from tide.lineage import ledger
from tide.lineage import metadata as lineage
from tide.policies import ApprovalPolicy
from tide.repositories import MAIN
from tide.serving.serving_file import draft_prefix, read_draft, read_serving
from tide.store.base import Store

REQUEST, ANSWER, SETTLED, STALE = "approval_request", "approval_answer", "approval_settled", "approval_stale"
"""Kinds in the ledger."""
APPROVAL_FILE = "approval.json"
"""Beside a draft: how the people who were asked decided."""


class Waiting(Value):
    """A promotion that waits for people, and what they answered so far."""

    request: ApprovalRequest
    answers: tuple[ApprovalAnswer, ...]

    @property
    def approved_by(self) -> tuple[str, ...]:
        """Who agreed, each once, as it was when they answered."""
        agreed = [a.reviewer for a in self.answers if a.decision == "approve" and not a.problems]
        return tuple(dict.fromkeys(agreed))

    @property
    def last_problems(self) -> tuple[str, ...]:
        """What was wrong with the newest answer; empty when it counts, or there is none."""
        return self.answers[-1].problems if self.answers else ()


@dataclass(frozen=True)
class Book:
    """All records of approvals of a service, oldest first."""

    requests: Sequence[ApprovalRequest]
    answers: Sequence[ApprovalAnswer]
    settled: Sequence[ApprovalSettlement]
    stale: Sequence[ApprovalSettlement]

    def answers_to(self, request: ApprovalRequest) -> tuple[ApprovalAnswer, ...]:
        """Answers of one request, in their order; one that a killed run wrote twice is there once, as first written."""
        digest = request.digest()
        first = {a.round: a for a in reversed(self.answers) if a.request == digest}
        return tuple(first[number] for number in sorted(first))

    def end_of(self, request: ApprovalRequest) -> ApprovalSettlement | None:
        """How a request ended; None while it waits. An approval that came to nothing ended stale."""
        digest = request.digest()
        return next((s for s in (*self.stale, *self.settled) if s.request == digest), None)

    def waiting(self) -> list[Waiting]:
        """What has not ended."""
        return [Waiting(request=r, answers=self.answers_to(r)) for r in self.requests if self.end_of(r) is None]

    def of_run(self, run: str) -> ApprovalRequest | None:
        """The request that a run made last, unless it is stale; it may have ended otherwise."""
        mine = [r for r in self.requests if r.run == run]
        return mine[-1] if mine and mine[-1].digest() not in {s.request for s in self.stale} else None

    def spent(self) -> set[str]:
        """Digests of verdicts that were refused or came to nothing: no promotion starts from one again."""
        return {s.verdict for s in (*self.settled, *self.stale) if s.outcome == "refused"}


def read(store: Store, repository: str) -> Book:
    """All records of approvals in the ledger of a drafts repository; an empty book when there are none."""
    return Book(
        ledger.every(store, repository, REQUEST, ApprovalRequest),
        ledger.every(store, repository, ANSWER, ApprovalAnswer),
        ledger.every(store, repository, SETTLED, ApprovalSettlement),
        ledger.every(store, repository, STALE, ApprovalSettlement),
    )


def waiting(store: Store, repository: str) -> list[Waiting]:
    """Promotions that wait for people, the oldest first; one whose time is over is here until that is recorded."""
    return read(store, repository).waiting()


def reasons_for(store: Store, repository: str, verdict: Verdict, policy: ApprovalPolicy) -> tuple[str, ...]:
    """Why a person must agree to a promotion; empty when nobody needs to, or a killed one was merged already."""
    if policy.mode == "auto":
        return ()
    stable = read_serving(store, repository).stable
    if stable == ServingDraft(digest=verdict.candidate, verdict=verdict.digest()):
        return ()
    first = False
    if policy.mode == "conditions":
        first = stable is None or read_draft(store, repository, MAIN, stable.digest).imported
    return approval_rules.needed(verdict, policy, first=first)


def require(store: Store, repository: str, verdict: Verdict, policy: ApprovalPolicy, *, loopback: bool) -> None:
    """Let a promotion by hand through the same door: where policy wants a person, the ledger has their approval.

    Raises:
        ApprovalRefused: it has not.
        SignatureRefused: it says so, and the answers in it do not.
    """
    reasons = reasons_for(store, repository, verdict, policy)
    if not reasons:
        return
    book, digest = read(store, repository), verdict.digest()
    for request in book.requests:
        ended = book.end_of(request)
        if request.verdict == digest and ended is not None and ended.outcome == "approved":
            approval_rules.require_approved(request, book.answers_to(request), policy, loopback=loopback)
            return
    raise ApprovalRefused(
        f"policy wants a person to approve verdict {digest[:12]} ({'; '.join(reasons)}), and nobody has: "
        "`tide run promote -p branch=BRANCH` asks"
    )


def ask(store: Store, repository: str, request: ApprovalRequest) -> None:
    """Record that a promotion waits."""
    ledger.append(store, repository, REQUEST, request, at=request.asked_at)


def answer(store: Store, repository: str, given: ApprovalAnswer) -> None:
    """Record what a filled form said, whether it counts or not."""
    ledger.append(store, repository, ANSWER, given, at=given.at)


def settle(
    store: Store, repository: str, request: ApprovalRequest, settlement: ApprovalSettlement
) -> ApprovalSettlement:
    """Record how a request ended; returns what stands, which is what the first of two that settle it wrote."""
    try:
        _once(store, repository, SETTLED, request, settlement)
    except AlreadyExists:
        found = read(store, repository).settled
        return next(s for s in found if s.request == settlement.request)
    return settlement


def void(store: Store, repository: str, request: ApprovalRequest, reason: str, now: float) -> ApprovalSettlement:
    """Record that a request came to nothing, approved or not: its verdict does not hold any more. Again is harmless."""
    settlement = approval_rules.refusal(request, "stale", [reason], now)
    with contextlib.suppress(AlreadyExists):
        _once(store, repository, STALE, request, settlement)
    return settlement


def attach(store: Store, repository: str, verdict: Verdict, settlement: ApprovalSettlement) -> None:
    """Put an approval beside the candidate and into its lineage, which a promotion merges. Again is harmless."""
    path = f"{draft_prefix(verdict.candidate)}{APPROVAL_FILE}"
    record = lineage.approved_record(verdict, settlement).to_metadata()
    if store.head(repository, settlement.branch).metadata == record:
        return
    store.put(repository, settlement.branch, path, settlement.to_json().encode())
    with contextlib.suppress(NothingToCommit):
        store.commit(repository, settlement.branch, f"approved {verdict.candidate[:12]}", record)


def expire(
    store: Store, repository: str, policy: ApprovalPolicy, *, loopback: bool, now: float | None = None
) -> list[ApprovalSettlement]:
    """Settle every request that waits and need not any more: its time is over, or a newer one took over from it.

    Returns:
        What was settled now. The runs are still suspended: resume them, so that they end.
    """
    book, moment, found = read(store, repository), time.time() if now is None else now, []
    for item in book.waiting():
        ended = approval_rules.conclude(
            item.request, book.requests, item.answers, policy, loopback=loopback, now=moment
        )
        if ended is not None:
            found.append(settle(store, repository, item.request, ended))
    return found


def _once(store: Store, repository: str, kind: str, request: ApprovalRequest, settlement: ApprovalSettlement) -> None:
    """Its name has the time of the request, not of the settlement: so there can be one only, in whatever process."""
    ledger.append(store, repository, kind, settlement, at=request.asked_at, once=request.digest()[:8])
