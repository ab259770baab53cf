"""The baseline of a draft: what it accepted right after its promotion, and on what inputs; frozen.

Owns which requests make it and how a later request compares with it. Knows nothing of thresholds or decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from tide.config import DriftPolicy
from tide.domain import Record
from tide.input_shift import Signal, reference
from tide.request_stats import Floats, RequestStats

MIN_REGIME_REQUESTS = 10
"""A regime with fewer baseline requests is judged by the baseline of all: its own mean would be noise."""
MIN_SD = 0.01
"""Spread of the acceptance rate is never taken for smaller: one odd request must not sound the alarm."""


class Baseline(Record):
    """What one draft accepted, on what inputs, right after its promotion; never changed."""

    schema_version: Literal[1] = 1
    draft: str
    requests: int
    until: float
    """Finish of its last request, seconds since the epoch: later requests are judged."""
    rate: float
    regimes: dict[str, float]
    """Acceptance rate by ``slice|sampling``."""
    sd: float
    """Of a request's residual, weighted by verify steps."""
    mean_steps: float
    signals: dict[str, Signal]

    def expected(self, stats: RequestStats) -> Floats:
        """[n] acceptance rate of each request's regime; that of all where the regime is new or was rare."""
        return _expected(stats, self.regimes, self.rate)

    def expected_pooled(self, stats: RequestStats) -> float | None:
        """Pooled rate that these measured requests would have had at the baseline; None when there are none."""
        return float(np.average(self.expected(stats), weights=stats.proposed)) if len(stats) else None

    def standardised(self, stats: RequestStats) -> Floats:
        """[n] residuals in standard deviations; a request of many verify steps says more, so it weighs more."""
        residual = stats.rate - self.expected(stats)
        return residual / self.sd * np.sqrt(stats.verify_steps / self.mean_steps)


def freeze_baseline(stats: RequestStats, policy: DriftPolicy, *, draft: str) -> Baseline | None:
    """The baseline of a draft from the first requests it served, or None until there are enough.

    Args:
        stats: requests since the draft's promotion; those of other drafts are left out.
        draft: digest of the draft in serving.
    """
    own = stats.take(stats.draft == draft)
    measured = own.take(own.measured)
    if len(measured) < policy.baseline_requests:
        return None
    until = float(measured.finished_at[policy.baseline_requests - 1])
    first = measured.take(measured.finished_at <= until)
    overall = float(first.accepted.sum() / first.proposed.sum())
    regimes = {}
    for regime in np.unique(first.regime):
        part = first.take(first.regime == regime)
        if len(part) >= MIN_REGIME_REQUESTS:
            regimes[str(regime)] = float(part.accepted.sum() / part.proposed.sum())
    residual = first.rate - _expected(first, regimes, overall)
    spread = float(np.sqrt(np.average(residual**2, weights=first.verify_steps)))
    return Baseline(
        draft=draft,
        requests=len(first),
        until=until,
        rate=overall,
        regimes=regimes,
        sd=max(spread, MIN_SD),
        mean_steps=float(first.verify_steps.mean()),
        signals=reference(own.take(own.finished_at <= until), seed=0),
    )


def _expected(stats: RequestStats, regimes: Mapping[str, float], otherwise: float) -> Floats:
    return np.array([regimes.get(str(regime), otherwise) for regime in stats.regime], dtype=np.float64)
