"""What the gates saw and decided: drift, scores, verdicts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tide.domain.identity import DraftContract, GrownRecord, Record, TargetContract

ACCEPTANCE_DEFINITION = "pooled/1"
"""Generated tokens over verify steps, bonus token included, summed over requests before dividing."""


Count = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Counted where verification is greedy, expected where it samples."""


class RequestScore(GrownRecord):
    """One request walked with one draft: what serving would have done.

    Above temperature 0 steps, proposals and acceptances are expectations, in the proportions of the verify steps of
    this answer: their ratios mean what they mean for counts.
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"prompt_tokens", "accepted_at"})

    request: str
    conversation: str
    slice: str
    tokens: int = Field(ge=0)
    """Generated tokens covered by the verify steps."""
    verify_steps: Count
    proposed: Count
    accepted: Count
    prompt_tokens: int = Field(default=0, ge=0)
    """0: not known."""
    accepted_at: tuple[Count, ...] = ()
    """Verify steps that accepted at least d + 1 proposals, by depth d; empty when not known."""


class EvalReport(GrownRecord):
    """Acceptance of one draft on a set of held-out requests, request by request."""

    LATER: ClassVar[frozenset[str]] = frozenset({"draft_tokens"})

    schema_version: Literal[1] = 1
    definition: str = ACCEPTANCE_DEFINITION
    draft: str
    contract: DraftContract | None
    target: TargetContract
    states_commit: str
    steps: int = Field(ge=1)
    topk: int = Field(default=1, ge=1)
    draft_tokens: int | None = Field(default=None, ge=2)
    """Tokens of a verify step of a tree; None for a chain, which has steps + 1."""
    sampling: str = "greedy"
    """Regime: ``greedy``, ``temperature 0.70``, or ``unknown``; acceptance is never compared across regimes."""
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


class SliceVerdict(GrownRecord):
    """How the candidate compares on one slice, in acceptance length."""

    LATER: ClassVar[frozenset[str]] = frozenset({"more_requests", "detectable_effect"})

    slice: str
    requests: int
    candidate: float
    incumbent: float
    difference: Interval
    more_requests: int = 0
    """Further requests of this slice that would settle it, when it is what an inconclusive verdict waits for."""
    detectable_effect: float | None = None
    """True distance from the threshold that so many requests would show four times in five; None: they show none."""


class GateGeneration(Record):
    """The gate requests of one family of verdicts or more; see ``tide.promotion.gate``."""

    id: str
    """sha256 of the sorted ids of its requests when it was opened."""
    first: float
    """When its oldest shard was closed, seconds since the epoch."""
    until: float
    """When its newest shard was closed; what closed later is wholly new."""
    requests: int = Field(ge=0)
    used: int = Field(default=0, ge=0)
    """Verdicts it gave before this one, against whatever incumbent."""
    missing: int = Field(default=0, ge=0)
    """Wholly new gate requests that were still missing for the next generation."""


class PredictedThroughput(Record):
    """Speedups over plain decoding that the engine's profile predicts for the service's own load."""

    candidate: float
    incumbent: float
    """1 when nothing speculates yet."""
    break_even: float
    """Acceptance length below which speculation itself is slower than plain decoding."""
    concurrency: dict[int, float]
    """Weight of each number of running requests in the service's load."""


class Verdict(GrownRecord):
    """The promotion gate's decision; refusal is a normal value."""

    LATER: ClassVar[frozenset[str]] = frozenset(
        {"gate", "family", "family_alpha", "false_promotions_a_year", "throughput"}
    )

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
    gate: GateGeneration | None = None
    """The gate generation it was made on; None where requests were not drawn from the service's gate."""
    family: str = ""
    """Digest of gate generation and incumbent: the verdicts that share one alpha."""
    family_alpha: float | None = None
    """Chance that a family promotes one or more drafts that are no better, at most."""
    false_promotions_a_year: float | None = None
    """Expected, at most: if no candidate were ever better, at the schedule and this generation's traffic."""
    throughput: PredictedThroughput | None = None
    """None: the engine is not profiled, or its load is not known; the reasons say so."""
