"""The baseline of a draft: what it accepted right after its promotion, and on what inputs; frozen.

Owns which requests make it, how a later request compares with it, and how sure it is of itself. Knows nothing of
decisions.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from tide.config import DriftPolicy
from tide.domain import Record
from tide.drift.calibration import alarm_threshold, mean_error
from tide.drift.input_shift import Signal, reference
from tide.drift.state_shift import States, reference_states
from tide.states.request_stats import Bools, Floats, RequestStats

MIN_REGIME_REQUESTS = 10
"""A regime with fewer baseline requests is judged by the baseline of all: its own mean would be noise."""
MIN_SD = 0.01
"""Spread of the acceptance rate is never taken for smaller: one odd request must not sound the alarm."""
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Upper ends of the context-length buckets, tokens; the last bucket has none."""


class Regime(Record):
    """What the draft accepted in one regime (``slice|sampling``), or in all."""

    rate: float
    """Accepted over proposed, pooled."""
    sd: float
    """Of a request's residual, weighted by verify steps; one drawn to that of all where there are few requests."""
    centre: float
    """Mean standardised residual: that of requests differs from the pooled one, as long ones accept differently."""
    error: float
    """Standard error of ``centre``, standard deviations: how wrong the baseline may be about this regime."""


class Baseline(Record):
    """What one draft accepted, on what inputs, right after its promotion; never changed."""

    schema_version: Literal[1] = 1
    draft: str
    requests: int
    until: float
    """Finish of its last request, seconds since the epoch: later requests are judged."""
    overall: Regime
    """Of all requests; stands for a regime that is new or was rare, whose own rate may be as far off as regimes are."""
    regimes: dict[str, Regime]
    mean_steps: float
    alarm: float
    """Sum of losses that streams of these very requests pass at the policy's false alarm rate."""
    groups: dict[str, float]
    """Mean loss, standard deviations, of requests of a context bucket or with a cached prompt; see ``groups_of``."""
    absent: dict[str, float]
    """Share of requests without counters, token histogram, pooled state."""
    signals: dict[str, Signal]
    states: States | None

    def expected(self, stats: RequestStats) -> Floats:
        """[n] acceptance rate of each request's regime; that of all where the regime is new or was rare."""
        return self._of_regime(stats, "rate")

    def expected_pooled(self, stats: RequestStats) -> float | None:
        """Pooled rate that these measured requests would have had at the baseline; None when there are none."""
        return float(np.average(self.expected(stats), weights=stats.proposed)) if len(stats) else None

    def standardised(self, stats: RequestStats) -> Floats:
        """[n] residuals in standard deviations; a request of many verify steps says more, so it weighs more."""
        residual = stats.rate - self.expected(stats)
        return residual / self._of_regime(stats, "sd") * np.sqrt(stats.verify_steps / self.mean_steps)

    def losses(self, stats: RequestStats) -> Floats:
        """[n] standardised losses, of mean 0 in each regime of the baseline; no slack taken off."""
        return self._of_regime(stats, "centre") - self.standardised(stats)

    def slack(self, stats: RequestStats, policy: DriftPolicy) -> Floats:
        """[n] what a request may lose for nothing: never less than the baseline of its regime may be wrong by."""
        return np.maximum(policy.cusum_slack, policy.baseline_errors * self._of_regime(stats, "error"))

    def _of_regime(self, stats: RequestStats, name: str) -> Floats:
        names, place = np.unique(stats.regime, return_inverse=True)
        values = [getattr(self.regimes.get(str(regime), self.overall), name) for regime in names]
        return np.array(values, dtype=np.float64)[place]


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
    first, inputs = measured.take(measured.finished_at <= until), own.take(own.finished_at <= until)
    sure = _centred(first, _spread(first, Baseline(
        draft=draft, requests=len(first), until=until, overall=_regime(first), regimes=_regimes(first),
        mean_steps=float(first.verify_steps.mean()), alarm=0.0, groups={}, absent=absent_shares(inputs),
        signals=reference(inputs, seed=0), states=reference_states(inputs, seed=0),
    )))  # fmt: skip
    losses = sure.losses(first)
    alarm = alarm_threshold(
        losses - sure.slack(first, policy), first.conversation, seed=0,
        horizon=policy.false_alarm_requests, rate=policy.false_alarm_rate,
        error=mean_error(losses, first.conversation) if policy.baseline_errors else 0.0,
    )  # fmt: skip
    groups = {name: float(losses[mask].mean()) for name, mask in groups_of(first).items()}
    return sure.model_copy(update={"alarm": alarm, "groups": groups})


def groups_of(stats: RequestStats, at_least: int = MIN_REGIME_REQUESTS) -> dict[str, Bools]:
    """Masks of the requests of each context bucket (``context_2048``: 1025 to 2048 tokens), and of those whose prompt
    was cached or not; groups of fewer requests are left out."""
    bucket = np.searchsorted(CONTEXTS, stats.context)
    found = {f"context_{limit}": bucket == i for i, limit in enumerate(CONTEXTS)}
    found |= {"context_longer": bucket == len(CONTEXTS), "cached": stats.cached, "uncached": ~stats.cached}
    return {name: mask for name, mask in found.items() if mask.sum() >= at_least}


def absent_shares(stats: RequestStats) -> dict[str, float]:
    """Share of requests without counters, token histogram and pooled state."""
    present = {"counters": stats.measured, "sketch": stats.has_sketch, "pooled": stats.has_pooled}
    return {name: float(1 - mask.mean()) for name, mask in present.items()}


def _regimes(first: RequestStats) -> dict[str, Regime]:
    parts = {str(name): first.take(first.regime == name) for name in np.unique(first.regime)}
    return {name: _regime(part) for name, part in parts.items() if len(part) >= MIN_REGIME_REQUESTS}


def _regime(stats: RequestStats) -> Regime:
    return Regime(rate=float(stats.accepted.sum() / stats.proposed.sum()), sd=1.0, centre=0.0, error=0.0)


def _spread(first: RequestStats, bare: Baseline) -> Baseline:
    """The baseline with the standard deviations of what its rates leave over."""
    squares = (first.rate - bare.expected(first)) ** 2
    of_all = float(np.average(squares, weights=first.verify_steps))
    regimes = {}
    for name, regime in bare.regimes.items():
        mask = first.regime == name
        own, count = float(np.average(squares[mask], weights=first.verify_steps[mask])), int(mask.sum())
        variance = (count * own + MIN_REGIME_REQUESTS * of_all) / (count + MIN_REGIME_REQUESTS)
        regimes[name] = regime.model_copy(update={"sd": max(math.sqrt(variance), MIN_SD)})
    overall = bare.overall.model_copy(update={"sd": max(math.sqrt(of_all), MIN_SD)})
    return bare.model_copy(update={"overall": overall, "regimes": regimes})


def _centred(first: RequestStats, bare: Baseline) -> Baseline:
    """The baseline with where the residuals of each regime lie, and how surely.

    A regime that is not known is as far from the rest as the known ones are from one another.
    """
    values, regimes = bare.standardised(first), {}
    for name, regime in bare.regimes.items():
        mask = first.regime == name
        centre, error = float(values[mask].mean()), mean_error(values[mask], first.conversation[mask])
        regimes[name] = regime.model_copy(update={"centre": centre, "error": error})
    known = bare.expected(first)[np.isin(first.regime, list(regimes))]
    distance = float(known.std()) / bare.overall.sd if len(known) else 0.0
    error = math.hypot(mean_error(values, first.conversation), distance)
    overall = bare.overall.model_copy(update={"centre": float(values.mean()), "error": error})
    return bare.model_copy(update={"overall": overall, "regimes": regimes})
