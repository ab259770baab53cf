"""The profiles of a service's engines: write-once records on the ledger, and the one that holds for a target.

Owns the kind of the record and which of several counts. Knows nothing of how a profile is measured.
"""

from __future__ import annotations

from tide.domain import EngineProfile, TargetContract
from tide.errors import EvaluationError
from tide.lineage import ledger
from tide.store.base import Store

KIND = "profile"


def keep(store: Store, repository: str, profile: EngineProfile) -> str:
    """Record a profile; returns its path on the ledger branch.

    Raises:
        EvaluationError: it names no target, so that nobody would find it.
    """
    if profile.target is None:
        raise EvaluationError(
            "the profile names no target, so that no verdict would find it: measure a replica that captures "
            "(TIDE_SPOOL_DIR), which says what its target is"
        )
    return ledger.append(store, repository, KIND, profile)


def newest_for(
    store: Store, repository: str, target: TargetContract, *, steps: int | None = None
) -> EngineProfile | None:
    """The newest profile of a target's engine, or None.

    Args:
        steps: only one that says what a speculative step with so many draft steps costs.
    """
    for profile in reversed(ledger.every(store, repository, KIND, EngineProfile)):
        if profile.target == target and (steps is None or profile.holds_for(steps)):
            return profile
    return None
