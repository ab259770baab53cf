"""Predicted throughput: what an acceptance length is worth on one engine, at the load it serves.

Owns the formula and the interpolation between profiled points. Knows nothing of how a profile is measured, or of
thresholds.

Speedup over plain decoding is AL / (c(b) g + beta(b)) (Leviathan et al., 2023, section 3.3, with the costs of
a batch of b): c(b) is a draft step over a plain step, beta(b) a verify step over a plain step, g the draft steps.
A service also prefills, which no draft shortens. A request has the engine to itself for its prefill and shares each of
its steps with the b - 1 others, so that G tokens take, of the engine's time,

    plain        prefill + (G - 1) plain(b) / b                       prefill makes the first token
    speculative  prefill' + G / AL (verify(b) + g draft(b)) / b       AL counts every token, the first included
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    return acceptance_length * point.plain_step_s / speculative_step_s(point, steps)


def speculative_step_s(point: ProfilePoint, steps: int) -> float:
    """Seconds of a whole speculative step: its draft steps and the verification."""
    return point.draft_step_s * steps + point.verify_step_s


def predict(
    profile: EngineProfile,
    acceptance_length: float,
    *,
    steps: int,
    concurrency: Mapping[int, float],
    prompt_tokens: float = 0.0,
    output_tokens: float | None = None,
) -> float:
    """Speedup over plain decoding for a service's own load.

    Args:
        acceptance_length: pooled, bonus token included.
        steps: draft steps of a verify step.
        concurrency: share of the output tokens generated with so many requests running; need not sum to 1.
        prompt_tokens: mean prompt tokens of a request that are not cached; counts with ``output_tokens`` alone.
        output_tokens: mean tokens of an answer; None leaves prefill out.

    Raises:
        EvaluationError: the histogram is empty or has no weight, the profile is of another number of draft steps, or
            a length is none.
    """
    if not (math.isfinite(acceptance_length) and acceptance_length > 0):
        raise EvaluationError(f"an acceptance length of {acceptance_length} predicts nothing: it is a number above 0")
    cost = _token_cost(profile, steps, concurrency, prompt_tokens, output_tokens)
    return cost.plain_s / (cost.prefill_s + cost.steps_s / acceptance_length)


def break_even(
    profile: EngineProfile,
    *,
    steps: int,
    concurrency: Mapping[int, float],
    prompt_tokens: float = 0.0,
    output_tokens: float | None = None,
) -> float:
    """Acceptance length below which plain decoding is faster at this load; infinite when the draft's prefill alone is.

    Arguments and errors are those of ``predict``.
    """
    cost = _token_cost(profile, steps, concurrency, prompt_tokens, output_tokens)
    left = cost.plain_s - cost.prefill_s
    return cost.steps_s / left if left > 0 else math.inf


@dataclass(frozen=True)
class _TokenCost:
    """Seconds of the engine for an output token, in the mean of a load."""

    plain_s: float
    """Without speculation, prefill included."""
    prefill_s: float
    """The speculative engine's prefill."""
    steps_s: float
    """The speculative engine's steps at an acceptance length of 1."""


def _token_cost(
    profile: EngineProfile,
    steps: int,
    concurrency: Mapping[int, float],
    prompt_tokens: float,
    output_tokens: float | None,
) -> _TokenCost:
    """Time adds up, not speed: every part of a load weighs by the time that its tokens take."""
    if not profile.holds_for(steps):
        raise EvaluationError(
            f"the profile was measured with {profile.steps} draft steps and cannot say what {steps} cost: give "
            "`tide profile` a second engine with another number of draft steps, or profile the one that serves"
        )
    shares = _shares(concurrency)
    points = {b: point_at(profile, b) for b in shares}
    plain = sum(share * points[b].plain_step_s / b for b, share in shares.items())
    ours = sum(share * speculative_step_s(points[b], steps) / b for b, share in shares.items())
    if output_tokens is None:
        return _TokenCost(plain, 0.0, ours)
    if not (output_tokens >= 1 and prompt_tokens >= 0):
        raise EvaluationError(f"a request of {prompt_tokens} prompt and {output_tokens} output tokens is none")
    prefill = profile.prefill_request_s + profile.prefill_token_s * prompt_tokens
    draft = profile.draft_prefill_request_s + profile.draft_prefill_token_s * prompt_tokens
    decoded = (output_tokens - 1) / output_tokens
    return _TokenCost(plain * decoded + prefill / output_tokens, (prefill + draft) / output_tokens, ours)


def _shares(concurrency: Mapping[int, float]) -> dict[int, float]:
    total = sum(concurrency.values())
    if not (total > 0 and math.isfinite(total)):
        raise EvaluationError("the concurrency histogram is empty: serve and harvest some requests first")
    if any(b < 1 or share < 0 for b, share in concurrency.items()):
        raise EvaluationError(f"{dict(concurrency)} is no concurrency histogram: from 1 on, and no share below 0")
    return {b: share / total for b, share in concurrency.items() if share > 0}


def seconds_per_token(
    profile: EngineProfile, acceptance_length: float, *, steps: int, concurrency: Mapping[int, float]
) -> float:
    """Seconds of the engine for each output token at a service's load, prefill left out: (c g + beta) / (b AL).

    Arguments and errors are those of ``predict``.
    """
    return _token_cost(profile, steps, concurrency, 0.0, None).steps_s / acceptance_length
