"""Which promotions wait for a person, as a screen and a metric show it.

Owns the view alone; what waits is the ledger's (``steps``). Works over the Store port.
"""

from __future__ import annotations

from tide.approvals import steps as approvals
from tide.domain import Value
from tide.store.base import Store


class Waiting(Value):
    """A promotion that waits for people."""

    candidate: str
    verdict: str
    """Digest of the verdict."""
    since: float
    """Seconds since the epoch."""
    run: str
    """Flow run that is suspended for it: `tide approve` takes it."""
    expires_at: float
    """When it counts as refused; seconds since the epoch."""
    approved_by: tuple[str, ...]
    """Who agreed so far."""
    approvers: int
    """People who must agree."""


def waiting(store: Store, repository: str) -> list[Waiting]:
    """Promotions that wait for people, the oldest first."""
    return [_view(item) for item in approvals.waiting(store, repository)]


def _view(item: approvals.Waiting) -> Waiting:
    request = item.request
    return Waiting(
        candidate=request.candidate,
        verdict=request.verdict,
        since=request.asked_at,
        run=request.run,
        expires_at=request.expires_at,
        approved_by=item.approved_by,
        approvers=request.approvers,
    )
