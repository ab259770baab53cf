"""How much the demo does: sizes of its phases, its policy, and the seconds they take at reference speed.

Owns the numbers of the story, in one place. Knows nothing of how a phase is carried out.
"""

from __future__ import annotations

from tide.config import CanaryPolicy, CapturePolicy, DriftPolicy, Policy, PromotionPolicy
from tide.domain import TrainingConfig, Value


class Plan(Value):
    """Sizes of one telling."""

    first_requests: int
    """Served before any draft exists; the static draft is trained on them."""
    baseline_requests: int
    """Served right after the first promotion: what drift is measured against."""
    shifted_requests: int
    """Served after the shift, before the first look of the drift gate."""
    second_look_requests: int
    """Served between its first and second look: inputs must have moved in two windows."""
    adapted_requests: int
    """Served with the adapted draft before it is measured: what a service sees after a promotion."""
    first_tokens: int
    shifted_tokens: int
    """Generated tokens a request at most, before and after the shift."""
    harvest_concurrency: int
    static_steps: int
    adapted_steps: int
    gate_share: float | None
    """Share of gate conversations among the prompts served; None: as they come, a tenth."""
    measure: dict[int, int]
    """Requests of one measured pass, by concurrency."""
    measure_tokens: int
    repeats: int
    seconds: dict[str, float]
    """Expected seconds of each step at reference speed."""


FULL = Plan(
    first_requests=320,
    baseline_requests=45,
    shifted_requests=200,
    second_look_requests=45,
    adapted_requests=40,
    first_tokens=80,
    shifted_tokens=64,
    harvest_concurrency=16,
    static_steps=300,
    adapted_steps=300,
    gate_share=None,
    measure={1: 5, 4: 12},
    measure_tokens=64,
    repeats=3,
    seconds={
        "start": 60,
        "serve without a draft": 180,
        "first cycle": 360,
        "serve with the static draft": 45,
        "shift the traffic": 180,
        "second cycle": 400,
        "serve with the adapted draft": 40,
        "measure": 300,
    },
)
FAST = Plan(
    first_requests=128,
    baseline_requests=24,
    shifted_requests=96,
    second_look_requests=24,
    adapted_requests=12,
    first_tokens=48,
    shifted_tokens=40,
    harvest_concurrency=16,
    static_steps=70,
    adapted_steps=50,
    gate_share=0.25,
    measure={1: 2, 4: 4},
    measure_tokens=32,
    repeats=1,
    seconds={
        "start": 60,
        "serve without a draft": 30,
        "first cycle": 110,
        "serve with the static draft": 25,
        "shift the traffic": 35,
        "second cycle": 110,
        "serve with the adapted draft": 15,
        "measure": 60,
    },
)


def policy(plan: Plan, steps: int) -> Policy:
    """The policy of one cycle of the demo: short windows and few requests, the same gates as in production.

    Args:
        steps: optimiser steps of the training run.
    """
    return Policy(
        capture=CapturePolicy(window_s=5, floor_rate=1.0),
        drift=DriftPolicy(
            min_requests=min(30, plan.second_look_requests * 2 // 3),
            baseline_requests=max(2, plan.baseline_requests * 2 // 3),
            bootstrap_tokens=500,
            # A baseline of a few requests may be off by half a standard deviation, and a service with so few would
            # wait. The demo looks at some hundred requests, once, after a change that it makes itself.
            baseline_errors=0,
            cusum_threshold=15,
            false_alarm_requests=plan.shifted_requests + plan.second_look_requests,
        ),
        # Steps, not epochs, end a run of the demo: its length must be foreseeable.
        train=TrainingConfig(epochs=50, max_steps=steps, learning_rate=2e-3, prompt_rows=32, checkpoints=3),
        # A slice of a handful of requests cannot settle a margin of .05: it is reported, and decides from ten on.
        promotion=PromotionPolicy(min_requests=5, min_slice_requests=10),
        # The first promotion restarts the only server, and nobody is served meanwhile: a long watch would see nothing.
        canary=CanaryPolicy(wait_s=15, max_requests=20, min_requests=5, poll_s=1),
        train_tokens=60_000,
        gate_requests=30,
        selection_requests=20,
    )
