"""The canary: the lease of the replicas that try a candidate, what was seen of it there, and its refusal."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import Digest, GrownRecord, Record
from tide.domain.replicas import ReplicaSwap


class CanaryLease(Record):
    """Who tries which candidate on which replicas, and until when others leave these alone: in ``serving.json``."""

    draft: Digest
    verdict: str
    """Digest of the verdict that lets it."""
    replicas: tuple[str, ...]
    run: str
    """``host/process/start`` of the promoter."""
    lease_until: float
    """Seconds since the epoch; later, anybody ends it with the incumbent."""


class CanaryReport(Record):
    """What was seen of a candidate while it served on the canary, and what follows from it.

    ``passed`` and ``off`` let the promotion go on. ``regression``: its acceptance is below the incumbent's on the very
    same requests; ``engine``: it is below what the candidate's own walk accepts, so that the engine loses it; ``dead``:
    nothing was ever accepted; ``failed``: a replica did not swap, answer or draft, or the promoter died.
    """

    outcome: Literal["passed", "off", "regression", "engine", "dead", "failed"]
    reasons: tuple[str, ...]
    figures: dict[str, float | None] = Field(default_factory=dict)
    """``requests`` compared, ``served`` by the candidate, mean rates ``live``, ``incumbent_walk``, ``candidate_walk``,
    evidence against it as ``regression_evidence`` and ``engine_evidence`` (refused at 1/alpha), ``seconds``."""

    @property
    def good(self) -> bool:
        """True when the promotion may go on."""
        return self.outcome in ("passed", "off")


class CanaryRefusal(GrownRecord):
    """A promotion that ended with the incumbent in serving, and why: in the ledger."""

    schema_version: Literal[1] = 1
    kind: Literal["canary"] = "canary"
    generation: int
    """The one it would have been."""
    previous: str | None
    """Digest of the incumbent, which serves again."""
    lease: CanaryLease
    report: CanaryReport
    replicas: tuple[ReplicaSwap, ...]
    """How the incumbent came back, replica by replica; those that could not be reached are named."""
    at: float
