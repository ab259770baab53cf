"""What one replica did when its draft was to change."""

from __future__ import annotations

from typing import ClassVar

from tide.domain.identity import GrownRecord


class ReplicaSwap(GrownRecord):
    """What one replica did during a rollout."""

    LATER: ClassVar[frozenset[str]] = frozenset({"out_of_service"})

    replica: str
    before: str
    after: str
    """Digest, ``none``, or ``unknown`` of a replica that did not answer."""
    seconds: float
    restarted: bool = False
    out_of_service: str = ""
    """Why it does not serve what it should: it was not reached, and stays out until it starts again or `reconcile`
    reaches it. Empty: it serves ``after``, and was seen to generate with it."""
