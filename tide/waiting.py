"""Which promotions wait for a person, as the ledger tells it.

Owns that rule alone. Works over the Store port. Knows nothing of forms, runs or policy.
"""

from __future__ import annotations

from tide import ledger_tail
from tide.domain import Value, Verdict
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
    what serves now, and was not carried out before what serves now came back.
    """
    entry, verdict = ledger_tail.newest(store, repository, "verdict").get("verdict", (None, None))
    if entry is None or not isinstance(verdict, Verdict) or verdict.outcome != "promote":
        return []
    serving = read_serving(store, repository)
    incumbent = serving.stable.digest if serving.stable else NO_DRAFT
    carried_out = serving.previous is not None and serving.previous.verdict == verdict.digest()
    if incumbent != verdict.incumbent or carried_out:
        return []
    return [Waiting(candidate=verdict.candidate, verdict=verdict.digest(), since=entry.at)]
