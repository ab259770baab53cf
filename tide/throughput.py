"""Predicted throughput: what an acceptance length is worth on one engine, at the concurrency it serves with.

Owns the formula and the interpolation between profiled points. Knows nothing of how a profile is measured, or of
thresholds.

Speedup over plain decoding is AL / (c(b) g + beta(b)) (Leviathan et al., 2023, section 3.3, with the costs of
a batch of b): c(b) is a draft step over a plain step, beta(b) a verify step over a plain step, g the draft steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tide.domain import EngineProfile, ProfilePoint
from tide.errors import EvaluationError


def point_at(profile: EngineProfile, concurrency: float) -> ProfilePoint:
    """Step times at a concurrency, linear between the profiled ones and flat beyond them."""
    places = [p.concurrency for p in profile.points]
    seconds = {
        name: float(np.interp(concurrency, places, [getattr(p, name) for p in profile.points]))
        for name in ("plain_step_s", "verify_step_s", "draft_step_s")
    }
    return ProfilePoint(concurrency=max(round(concurrency), 1), **seconds)


def speedup(acceptance_length: float, point: ProfilePoint, steps: int) -> float:
    """Output tokens a second over plain decoding's, prefill left out: AL / (c g + beta)."""
    return acceptance_length * point.plain_step_s / (point.draft_step_s * steps + point.verify_step_s)


def predict(profile: EngineProfile, acceptance_length: float, *, steps: int, concurrency: Mapping[int, float]) -> float:
    """Speedup over plain decoding for a service's own load.

    Args:
        acceptance_length: pooled, bonus token included.
        steps: draft steps of a verify step.
        concurrency: share of the output tokens generated with so many requests running; need not sum to 1.

    Raises:
        EvaluationError: the histogram is empty, or has no weight.
    """
    weight = sum(concurrency.values())
    if not weight > 0:
        raise EvaluationError("the concurrency histogram is empty: serve and harvest some requests first")
    # Time adds up, not speed: tokens served at b take 1 / speedup(b) of their time without speculation.
    plain = sum(share * point_at(profile, b).plain_step_s / b for b, share in concurrency.items())
    ours = sum(
        share * point_at(profile, b).plain_step_s / b / speedup(acceptance_length, point_at(profile, b), steps)
        for b, share in concurrency.items()
    )
    return plain / ours


def break_even(profile: EngineProfile, *, steps: int, concurrency: Mapping[int, float]) -> float:
    """Acceptance length below which plain decoding is faster at this load."""
    return 1.0 / predict(profile, 1.0, steps=steps, concurrency=concurrency)
