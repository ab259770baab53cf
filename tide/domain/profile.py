"""What a step of the engine costs at each concurrency: measured once an engine, read by every promotion."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import Record, TargetContract


class ProfilePoint(Record):
    """Seconds of one step of the engine with so many requests running."""

    concurrency: int = Field(ge=1)
    plain_step_s: float = Field(gt=0)
    """One decode step of the target without speculation."""
    verify_step_s: float = Field(gt=0)
    """The part of a speculative step that does not grow with the draft steps: verification and bookkeeping."""
    draft_step_s: float = Field(ge=0)
    """Each draft step of a speculative step."""


class EngineProfile(Record):
    """Step times of one engine, with and without speculation."""

    schema_version: Literal[1] = 1
    target: TargetContract | None = None
    engine: str = ""
    machine: str = ""
    topk: int = Field(default=1, ge=1)
    draft_tokens: int | None = Field(default=None, ge=2)
    """Tokens of a verify step; steps + 1 for a chain when None."""
    prefill_token_s: float = Field(default=0.0, ge=0)
    """Seconds of prefill for each prompt token that is not cached."""
    points: tuple[ProfilePoint, ...] = Field(min_length=1)
    """By rising concurrency."""
    measured_at: float = 0.0
