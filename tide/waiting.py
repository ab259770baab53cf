"""Which promotions wait for a person, as the ledger tells it.

Owns that rule alone. Works over the Store port. Knows nothing of forms, runs or policy.
"""

from __future__ import annotations

from tide import ledger_tail
from tide.domain import Promotion, Value, Verdict
from tide.serving_file import read_serving
from tide.store.base import Store

NO_DRAFT = "none"


class Waiting(Value):
    """A verdict that says promote and that nobody has acted on."""

    candidate: str
    verdict: str
    """Digest of the verdict."""
    since: float
    """Seconds since the epoch."""
    run: str = ""
    """Flow run that is suspended for it; empty when none is known."""


def waiting(store: Store, repository: str) -> list[Waiting]:
    """Promotions that wait for a person, oldest first.

    The newest verdict alone can wait: it supersedes every one before. It waits while it says promote, was made against
    what serves now, and no promotion was recorded on it.
    """
    found = ledger_tail.newest(store, repository, {"verdict": Verdict, "promotion": Promotion})
    entry, verdict = found.get("verdict", (None, None))
    if entry is None or not isinstance(verdict, Verdict) or verdict.outcome != "promote":
        return []
    stable = read_serving(store, repository).stable
    if (stable.digest if stable else NO_DRAFT) != verdict.incumbent:
        return []
    _, promotion = found.get("promotion", (None, None))
    if isinstance(promotion, Promotion) and promotion.verdict == verdict.digest():
        return []
    return [Waiting(candidate=verdict.candidate, verdict=verdict.digest(), since=entry.at)]
