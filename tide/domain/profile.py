"""What a step of the engine costs at each concurrency: measured once an engine, read by every promotion."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from tide.domain.identity import Record, TargetContract


class ProfilePoint(Record):
    """Seconds of one step of the engine with so many requests running."""

    concurrency: int = Field(ge=1)
    plain_step_s: float = Field(gt=0)
    """One decode step of the target without speculation."""
    verify_step_s: float = Field(gt=0)
    """The part of a speculative step that does not grow with the draft steps: verification and bookkeeping. The whole
    step where the profile is bound to its ``steps``."""
    draft_step_s: float = Field(ge=0)
    """Each draft step of a speculative step, with what its token adds to verification; 0 in a bound profile."""


class EngineProfile(Record):
    """Step times of one engine, with and without speculation."""

    schema_version: Literal[1] = 1
    target: TargetContract | None = None
    engine: str = ""
    machine: str = ""
    steps: int | None = Field(default=None, ge=0)
    """The only number of draft steps it holds for: one speculative setting was measured, which cannot tell draft steps
    from verification. None: it holds for any number."""
    topk: int = Field(default=1, ge=1)
    draft_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a verify step; steps + 1 for a chain when None."""
    prefill_request_s: float = Field(default=0.0, ge=0)
    """Seconds of a request's prefill, however short its prompt."""
    prefill_token_s: float = Field(default=0.0, ge=0)
    """Seconds of prefill for each prompt token that is not cached."""
    draft_prefill_request_s: float = Field(default=0.0, ge=0)
    """What the draft adds to ``prefill_request_s``."""
    draft_prefill_token_s: float = Field(default=0.0, ge=0)
    """What the draft adds to ``prefill_token_s``."""
    points: tuple[ProfilePoint, ...] = Field(min_length=1)
    """By rising concurrency."""
    measured_at: float = 0.0

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if any(a.concurrency >= b.concurrency for a, b in pairwise(self.points)):
            found = ", ".join(str(p.concurrency) for p in self.points)
            raise ValueError(f"points stand at concurrency {found}: give each once, by rising concurrency")
        return self

    def holds_for(self, steps: int) -> bool:
        """Whether it says what a speculative step with so many draft steps costs."""
        return self.steps in (None, steps)
