"""The groups of the policy: by what captures, drift, cost, promotions, approvals, canaries and retention are decided.

Owns defaults and their bounds. Knows nothing of files or environments; ``config`` reads them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from tide.domain import Digest, Record


class FiniteRecord(Record):
    """YAML knows .inf and .nan; JSON, which digests are taken of, does not."""

    model_config = ConfigDict(allow_inf_nan=False)


class CapturePolicy(FiniteRecord):
    """How logged states are cut into windows, and how many of them are wanted."""

    window_s: int = Field(default=300, ge=1)
    """Length of a harvest window, seconds; a shard belongs to the window of its close time."""
    floor_rate: float = Field(default=0.01, ge=0, le=1)
    """Share of requests whose states are captured while nothing is asked for; counters are kept of all."""
    gather_time_s: float = Field(default=3600.0, gt=0)
    """Seconds in which ``train_tokens`` are to be gathered once the drift gate asks for a draft."""
    byte_budget_per_s: float | None = Field(default=None, gt=0)
    """Bytes of states a second that all replicas together may write; None: no limit."""


class DriftPolicy(FiniteRecord):
    """When the traffic has moved far enough."""

    min_requests: int = Field(default=50, ge=1)
    """Fewer measured requests than this give no verdict."""
    baseline_requests: int = Field(default=500, ge=2)
    """Measured requests after a promotion that are frozen as the baseline, ``warming`` until then. From some 500 on a
    loss of .05 of the rate is told from the baseline's own error; with fewer the slack grows."""
    cusum_slack: float = Field(default=0.25, ge=0)
    """k, in standard deviations of the per-request residual."""
    baseline_errors: float = Field(default=2.5, ge=0)
    """Standard errors of the baseline's own mean that the slack is never below; 0 takes the baseline for exact."""
    cusum_threshold: float = Field(default=25.0, gt=0)
    """h, in standard deviations, at least; higher where streams of the baseline's own requests pass it too often."""
    false_alarm_rate: float = Field(default=0.005, gt=0, lt=1)
    """Share of streams of ``false_alarm_requests`` requests of the baseline that may pass the threshold."""
    false_alarm_requests: int = Field(default=900, ge=1)
    consecutive_windows: int = Field(default=2, ge=1)
    input_js_threshold: float = Field(default=0.1, gt=0, le=1)
    """Jensen-Shannon distance of hashed-token histograms, sampling noise taken off, that counts as moved inputs."""
    length_js_threshold: float = Field(default=0.3, gt=0, le=1)
    """The same for prompt and response lengths in powers of two."""
    script_js_threshold: float = Field(default=0.2, gt=0, le=1)
    """The same for the mix of scripts."""
    pooled_mmd_threshold: float = Field(default=0.15, gt=0, le=1)
    """Square root of MMD^2 of pooled states that counts as moved inputs; 3 in 10 requests of another workload: .15."""
    absent_threshold: float = Field(default=0.1, gt=0, le=1)
    """Rise of the share of requests without counters, token histogram or pooled state that is worth a look."""
    engine_requests: int = Field(default=8, ge=1)
    """Requests both served and walked offline that tell the engine from the traffic; fewer say nothing."""
    bootstrap_tokens: int = Field(default=20_000, ge=1)
    """Training tokens that must be there before a first draft, or a draft in place of an imported one, is trained."""
    growth_factor: float = Field(default=2.0, gt=1)
    """Training tokens since the incumbent was trained, over those it was trained on, that promise headroom."""


class CostPolicy(FiniteRecord):
    """Whether the gain that a retrain promises is worth its cost. Off while ``training_cost`` is not set."""

    training_cost: float | None = Field(default=None, gt=0)
    """Device-seconds of one training run, all its devices together; None: the rule is off."""
    price_ratio: float = Field(default=1.0, gt=0)
    """Price of a second of a training device over that of a second of a serving engine."""
    horizon: float = Field(default=86_400.0, gt=0)
    """Seconds that the new draft is expected to serve the traffic it was made for."""
    recovery: float = Field(default=0.7, gt=0, le=1)
    """Share of the lost acceptance that a retrain brings back, before there is history of our own."""
    added: float = Field(default=0.05, ge=0)
    """Acceptance length that a retrain adds beyond what was lost, by more tokens or by inputs that were new to the
    incumbent, before there is history of our own."""
    prior_weight: float = Field(default=3.0, gt=0)
    """Retrains of history that weigh as much as the two figures above."""

    @property
    def on(self) -> bool:
        """False when nothing is weighed."""
        return self.training_cost is not None


class PromotionPolicy(FiniteRecord):
    """What a candidate must prove on the gate requests."""

    alpha: float = Field(default=0.04, ge=0.001, lt=0.5)
    """One-sided error rate a family; .04 nominal keeps the real one under .05."""
    min_gain: float = Field(default=0.02, ge=0)
    """Acceptance length that the overall lower bound must exceed."""
    slice_margin: float = Field(default=0.05, gt=0)
    """No slice may be worse than this, by its lower bound."""
    slice_margins: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Margins of single slices, by name; a name that no gate request has is an error when the gate decides."""
    context_bounds: tuple[Annotated[int, Field(gt=0)], ...] = (1024, 2048, 8192)
    """Prompt tokens at which one context slice ends and the next begins; none: contexts are not told apart."""
    min_requests: int = Field(default=20, ge=2)
    min_slice_requests: int = Field(default=20, ge=2)
    """Slices with fewer requests are pooled into ``other``."""
    resamples: int = Field(default=4000, ge=200)
    max_verdicts: int = Field(default=10, ge=1, le=20)
    """Verdicts that one gate generation gives."""
    cycle_s: float = Field(default=900.0, gt=0)
    """Seconds between cycles of the schedule, for the false promotions a year that a verdict reports."""
    seed: int = Field(default=0, ge=0)

    @field_validator("context_bounds")
    @classmethod
    def _rising(cls, bounds: tuple[int, ...]) -> tuple[int, ...]:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must rise")
        return bounds


class ApprovalPolicy(FiniteRecord):
    """When a person must agree to a promotion, who may, and how long it waits for them."""

    mode: Literal["auto", "manual", "conditions"] = "auto"
    """``auto``: the verdict is enough. ``manual``: always ask. ``conditions``: ask when one of those below holds."""
    first_draft: bool = True
    """A condition: no draft that was trained here serves yet."""
    gain_above: float | None = None
    """A condition: the estimated gain in acceptance length is above this, more than is plausible. None: not asked."""
    gain_below: float | None = None
    """A condition: the estimated gain is below this, hardly worth the change. None: not asked."""
    approvers: int = Field(default=1, ge=1, le=20)
    """Different people who must agree; one who refuses is enough to refuse."""
    reviewers: dict[Annotated[str, Field(pattern=r"^[\w][\w .@+-]{0,63}$")], Digest] = Field(default_factory=dict)
    """Public Ed25519 key of each reviewer by name, 64 hexadecimal digits; `tide reviewer-key` makes a pair."""
    unverified: Literal["loopback", "never", "always"] = "loopback"
    """Whether a form without a signature counts, as the web page sends it: only where Prefect's API is on loopback."""
    timeout_s: float = Field(default=259200.0, gt=0)
    """Seconds after which a promotion that still waits is refused."""

    @model_validator(mode="after")
    def _somebody_can_approve(self) -> Self:
        if len(set(self.reviewers.values())) < len(self.reviewers):
            raise ValueError("two reviewers have one key: a key stands for one person")
        if self.mode != "auto" and self.unverified == "never" and len(self.reviewers) < self.approvers:
            raise ValueError(f"{len(self.reviewers)} reviewers have a key, {self.approvers} must sign: nobody could")
        return self


class CanaryPolicy(FiniteRecord):
    """How a candidate is tried on one replica before the others follow, and when it is taken back."""

    max_requests: int = Field(default=100, ge=0)
    """Requests compared without a regression that end the watch; 0: nothing is watched, the swap is verified all the
    same."""
    min_requests: int = Field(default=30, ge=1)
    """Fewer compared when the time is over are called too little traffic in the record; the promotion goes on."""
    wait_s: float = Field(default=90.0, ge=0)
    """Seconds the watch takes at most; more than the replicas' TIDE_SHARD_AGE_S, or it sees nothing of a quiet one."""
    poll_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks at the spool and the replica."""
    margin: float = Field(default=0.03, gt=0, lt=1)
    """Acceptance rate (accepted over proposed) that the candidate may be below the incumbent, and live below walk."""
    alpha: float = Field(default=0.04, gt=0, lt=0.5)
    """Chance at most that a candidate within ``margin`` of the incumbent is taken back, however often it is looked."""
    engine_alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """The same for a healthy engine that is called faulty."""
    dead_requests: int = Field(default=50, ge=1)
    """Requests without a single accepted token that end a canary: a draft that does nothing, not noise."""
    answer_s: float = Field(default=120.0, gt=0)
    """Seconds in which a replica must generate a token: wide enough for a burst of long prefills before it."""
    lease_s: float = Field(default=900.0, gt=0)
    """Seconds for which `reconcile` leaves a canary alone: the watch, a restart and what takes its time."""
    unreachable: Literal["skip", "stop"] = "skip"
    """A replica that does not answer is named, and left out until it starts again or is reconciled; or it ends the
    promotion."""

    @model_validator(mode="after")
    def _lease_covers_the_watch(self) -> Self:
        if self.lease_s <= self.wait_s + self.answer_s:
            raise ValueError(f"lease_s must exceed wait_s + answer_s ({self.wait_s + self.answer_s:g})")
        return self


class RetentionPolicy(FiniteRecord):
    """Which windows of states stay on ``main``. With no limit set everything stays."""

    keep_windows: int | None = Field(default=None, ge=1)
    """Newest windows kept."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the newest windows kept, those that a live draft was trained on counted first."""
    lineage_days: int | None = Field(default=None, ge=0)
    """Days since its training that the windows of a draft in serving, or the one before it, are kept whatever the
    limits say; None: as long as it serves or can be rolled back to."""
    collect_after_days: int = Field(default=30, ge=1)
    """Days after which lakeFS's garbage collection may take what left ``main``."""

    @property
    def limited(self) -> bool:
        """False when everything stays."""
        return self.keep_windows is not None or self.max_bytes is not None
