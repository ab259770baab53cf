"""What serves, what was done to the replicas, and where it all came from."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from tide.domain.canary import CanaryLease, CanaryReport
from tide.domain.identity import Digest, GrownRecord, Record, Value
from tide.domain.replicas import ReplicaSwap


class ServingDraft(Value):
    """A draft in serving, and the verdict that put it there."""

    digest: Digest
    verdict: str | None = None


class Serving(Record):
    """``serving.json``: the one truth about what serves."""

    schema_version: Literal[1] = 1
    generation: int = Field(default=0, ge=0)
    stable: ServingDraft | None = None
    previous: ServingDraft | None = None
    canary: CanaryLease | None = None
    """The candidate on trial; what serves is ``stable`` all the same."""


class Promotion(GrownRecord):
    """A change of ``serving.json``, and what the replicas did; on main with those that had changed by its merge."""

    LATER: ClassVar[frozenset[str]] = frozenset({"canary"})

    schema_version: Literal[1] = 1
    kind: Literal["promotion", "rollback"]
    generation: int
    draft: str
    previous: str | None
    verdict: str | None
    replicas: tuple[ReplicaSwap, ...]
    at: float
    canary: CanaryReport | None = None
    """What was seen on the first replica before the others followed; None for a rollback, which tries nothing."""


class LineageRecord(Record):
    """What stands in a commit's metadata: kind, the thing made, and what it was made from."""

    schema_version: Literal[1] = 1
    kind: Literal[
        "states",
        "candidate",
        "pooled",
        "verdict",
        "canary",
        "release",
        "promotion",
        "rollback",
        "guard",
        "erasure",
        "retention",
    ]
    subject: str
    parents: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, str] = Field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        """Flat strings, as a commit takes them."""
        flat = {"tide.schema_version": str(self.schema_version), "tide.kind": self.kind, "tide.subject": self.subject}
        flat |= {f"tide.parent.{k}": v for k, v in sorted(self.parents.items())}
        return flat | {f"tide.{k}": v for k, v in sorted(self.facts.items())}

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Self | None:
        """The record in a commit's metadata, or None when the commit is not TIDE's."""
        if "tide.kind" not in metadata:
            return None
        own = {k.removeprefix("tide."): str(v) for k, v in metadata.items() if k.startswith("tide.")}
        parents = {k.removeprefix("parent."): own.pop(k) for k in list(own) if k.startswith("parent.")}
        version, kind, subject = int(own.pop("schema_version", "1")), own.pop("kind"), own.pop("subject", "")
        return cls.model_validate(
            {"schema_version": version, "kind": kind, "subject": subject, "parents": parents, "facts": own}
        )
