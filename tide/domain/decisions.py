"""What the gates saw and decided: drift, scores, verdicts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import DraftContract, Record, TargetContract

ACCEPTANCE_DEFINITION = "pooled/1"
"""Generated tokens over verify steps, bonus token included, summed over requests before dividing."""


class RequestScore(Record):
    """One request walked with one draft: what serving would have done."""

    request: str
    conversation: str
    slice: str
    tokens: int = Field(ge=0)
    """Generated tokens covered by the verify steps."""
    verify_steps: int = Field(ge=0)
    proposed: int = Field(ge=0)
    accepted: int = Field(ge=0)


class EvalReport(Record):
    """Acceptance of one draft on a set of held-out requests, request by request."""

    schema_version: Literal[1] = 1
    definition: str = ACCEPTANCE_DEFINITION
    draft: str
    contract: DraftContract | None
    target: TargetContract
    states_commit: str
    steps: int = Field(ge=1)
    topk: int = Field(default=1, ge=1)
    sampling: str = "greedy"
    scores: tuple[RequestScore, ...]

    @property
    def acceptance_length(self) -> float:
        """Pooled: tokens over verify steps, bonus included. 1.0 when nothing was verified."""
        steps = sum(s.verify_steps for s in self.scores)
        return sum(s.tokens for s in self.scores) / steps if steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens."""
        proposed = sum(s.proposed for s in self.scores)
        return sum(s.accepted for s in self.scores) / proposed if proposed else 0.0


class DriftReport(Record):
    """Whether retraining pays now, and why."""

    schema_version: Literal[1] = 1
    decision: Literal["none", "watch", "retrain"]
    cause: Literal["drift", "bootstrap", "headroom", "engine"] | None = None
    """Of a retrain; ``engine`` of a watch: the engine lost what the draft still has."""
    reasons: tuple[str, ...]
    figures: dict[str, float | None]
    incumbent: str
    states_commit: str


class Interval(Record):
    """An estimate with its one-sided bounds."""

    estimate: float
    low: float
    high: float


class SliceVerdict(Record):
    """How the candidate compares on one slice, in acceptance length."""

    slice: str
    requests: int
    candidate: float
    incumbent: float
    difference: Interval


class Verdict(Record):
    """The promotion gate's decision; refusal is a normal value."""

    schema_version: Literal[1] = 1
    outcome: Literal["promote", "reject", "inconclusive"]
    candidate: str
    incumbent: str
    reasons: tuple[str, ...]
    overall: SliceVerdict
    slices: tuple[SliceVerdict, ...]
    alpha: float
    attempt: int = 1
    detectable_effect: float | None = None
    more_requests: int = 0
    """Further requests needed, when inconclusive."""
    states_commit: str
    policy: str
    target: TargetContract
    definition: str = ACCEPTANCE_DEFINITION
    sampling: str = "greedy"
