"""What was chosen among several drafts, and whether training another one pays: records of the ledger."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import Digest, Record


class CheckpointScore(Record):
    """One checkpoint of a run, walked over the selection requests."""

    step: int
    draft: Digest
    acceptance_length: float | None
    """Pooled, bonus included; None when there were no selection requests."""


class CheckpointChoice(Record):
    """Which checkpoint of a run became the candidate, among which, and why."""

    schema_version: Literal[1] = 1
    chosen: Digest
    reason: str
    checkpoints: tuple[CheckpointScore, ...] = Field(min_length=1)
    """By rising step."""
    requests: int = Field(ge=0)
    """Selection requests that each was walked over."""
    final_loss: float | None = None
    states_commit: str = ""

    @property
    def acceptance_length(self) -> float | None:
        """Of the chosen one."""
        return next(c.acceptance_length for c in self.checkpoints if c.draft == self.chosen)


class PoolChoice(Record):
    """Which draft that served before is proposed again, among which, and why; none is a normal answer."""

    schema_version: Literal[1] = 1
    chosen: Digest | None
    reason: str
    incumbent: Digest
    incumbent_length: float | None
    """Acceptance length of the draft in serving on the same requests; None when nothing was walked."""
    lengths: dict[str, float]
    """Acceptance length by draft."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Why a draft that served before was not walked."""
    requests: int = Field(ge=0)
    """Selection requests that each was walked over."""
    states_commit: str


class CostDecision(Record):
    """Whether the gain expected of a retrain is worth the training."""

    schema_version: Literal[1] = 1
    decision: Literal["pays", "does not pay", "off"]
    reasons: tuple[str, ...]
    figures: dict[str, float | None]
    incumbent: str
    states_commit: str
