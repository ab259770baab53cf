"""A finished cycle, and by what the next one knows that there is nothing new to do: the window key.

The key is the states commit with the policy: late runs and a doubled window pin the commit that an earlier cycle has
worked through, whatever their schedule calls them. Works over the Store port; knows nothing of flows.
"""

from __future__ import annotations

from typing import Literal

from tide.domain import DriftReport, Record
from tide.lineage import ledger
from tide.store.base import Store

KIND = "cycle"


class Cycle(Record):
    """What a cycle that came to its end saw and did."""

    schema_version: Literal[1] = 1
    states_commit: str
    policy: str
    """Digest of the policy that it decided by."""
    drift: DriftReport
    candidate_branch: str | None = None


def finished(store: Store, drafts: str, states_commit: str, policy: str) -> Cycle | None:
    """The last finished cycle when it was about this commit under this policy, else None.

    Main only grows, so that an older cycle than the last one cannot have been about the commit it is at now.
    """
    last = ledger.newest(store, drafts, KIND, Cycle)
    return last if last and (last.states_commit, last.policy) == (states_commit, policy) else None


def finish(store: Store, drafts: str, cycle: Cycle) -> None:
    """Record a cycle's end. Only then: one that died half-way is taken up again by the next."""
    ledger.append(store, drafts, KIND, cycle)
