"""Who lost the acceptance, the traffic or the engine: a drift retrain is asked this before anything is trained.

Owns the rule. Knows nothing of stores or of how drafts are walked: live counters of requests, what the incumbent's
walk over the logged states of the SAME requests accepted, and the frozen baseline, all by request.

The walk sees the model and the text; it does not see the engine's draft KV, its prefix cache, or weights changed under
it. So a loss that the walk has too is the traffic's, and one that only the live counters have is the engine's
(sglang#32176: 4.49 -> 1.59 after cache pressure, 4.33 after a flush).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tide.config import DriftPolicy
from tide.domain import DriftReport, RequestScore
from tide.drift.baseline import Baseline
from tide.drift.calibration import mean_error
from tide.states.request_stats import RequestStats

SURE = 2.0
"""Standard errors that a difference must exceed to be more than chance."""


@dataclass(frozen=True)
class Rates:
    """Acceptance rates of the same requests."""

    requests: int
    live: float
    walked: float
    baseline: float
    error: float
    """Standard error of walked minus live, by conversation."""
    apart: float
    """Acceptance length walked minus live, over the walked one: what ``offline_live_tolerance`` is about."""


def check_engine(
    report: DriftReport,
    baseline: Baseline,
    window: RequestStats,
    walked: Sequence[RequestScore],
    policy: DriftPolicy,
    *,
    tolerance: float,
) -> DriftReport:
    """The report with the engine's part in it: a drift retrain stands, or becomes ``watch`` with the cause ``engine``.

    Args:
        report: a retrain for drift; any other is returned as it is.
        window: the requests that it judged.
        walked: the incumbent over the logged states of held-out requests, as many of the window's as there are.
        tolerance: how far walk and live may be apart, relative: ``offline_live_tolerance``.
    """
    if (report.decision, report.cause) != ("retrain", "drift"):
        return report
    measured = window.take(window.measured & (window.draft == baseline.draft) & (window.finished_at > baseline.until))
    rates = compare(baseline, measured, walked)
    figures = _figures(rates)
    if reason := _only_cached(baseline, measured, policy):
        return _watch(report, reason, figures)
    if rates is None or rates.requests < policy.engine_requests:
        have = rates.requests if rates else 0
        return _go_on(
            report,
            f"engine unchecked: {have} requests were both served and walked, {policy.engine_requests} are needed",
            figures,
        )
    return _by_walk(report, rates, figures, tolerance)


def evidence(report: DriftReport, stats: RequestStats) -> RequestStats:
    """The requests that speak on this: of the window judged, and all since the sum of losses began to climb.

    Args:
        stats: requests since the incumbent's promotion.
    """
    starts = [value for name in ("window_from", "loss_since") if (value := report.figures.get(name)) is not None]
    return stats.take(stats.finished_at >= min(starts, default=-np.inf))


def compare(baseline: Baseline, measured: RequestStats, walked: Sequence[RequestScore]) -> Rates | None:
    """Rates of the requests that were both served and walked; None when there are none.

    Requests most of whose prompt was cached are left out: no forward pass ran over it, so the walk lacks those states.
    """
    scores = {score.request: score for score in walked if score.proposed}
    common = measured.take(np.array([str(r) in scores for r in measured.request], dtype=np.bool_) & ~measured.cached)
    if not len(common):
        return None
    pairs = (scores[str(request)] for request in common.request)
    offline = np.array([[s.accepted, s.proposed, s.verify_steps] for s in pairs], dtype=np.float64)
    live, walk = common.accepted.sum() / common.proposed.sum(), offline[:, 0].sum() / offline[:, 1].sum()
    lengths = 1 + offline[:, 0].sum() / offline[:, 2].sum(), 1 + common.accepted.sum() / common.verify_steps.sum()
    # Linearised: what each request adds to the difference of the two pooled rates (Cochran, Sampling Techniques, 6.3).
    parts = (offline[:, 0] - walk * offline[:, 1]) / offline[:, 1].mean()
    parts -= (common.accepted - live * common.proposed) / common.proposed.mean()
    return Rates(
        requests=len(common),
        live=float(live),
        walked=float(walk),
        baseline=baseline.expected_pooled(common) or 0.0,
        error=mean_error(parts, common.conversation),
        apart=float(1 - lengths[1] / lengths[0]),
    )


def _by_walk(report: DriftReport, rates: Rates, figures: Mapping[str, float | None], tolerance: float) -> DriftReport:
    detail = (
        f"live {rates.live:.3f}, walked offline {rates.walked:.3f}, baseline {rates.baseline:.3f} "
        f"on the same {rates.requests} requests"
    )
    gap, lost = rates.walked - rates.live, rates.baseline - rates.live
    if abs(rates.apart) <= tolerance:
        return _go_on(report, f"traffic: walk and serving agree, {detail}", figures)
    if gap < 0 or gap <= SURE * rates.error:
        return _go_on(report, f"engine undecided: {detail}", figures)
    if gap >= lost / 2:
        return _watch(report, f"engine: the draft accepts offline what it does not in serving, {detail}", figures)
    return _go_on(report, f"traffic: most of the loss is the draft's, some the engine's, {detail}", figures)


def _only_cached(baseline: Baseline, measured: RequestStats, policy: DriftPolicy) -> str | None:
    """Why this is the engine, when requests with a cached prompt lost and those without did not."""
    losses = baseline.losses(measured)
    sides = {}
    for name, mask in (("cached", measured.cached), ("uncached", ~measured.cached)):
        if mask.sum() < max(policy.min_requests // 2, 2) or name not in baseline.groups:
            return None
        sides[name] = (
            float(losses[mask].mean()) - baseline.groups[name],
            mean_error(losses[mask], measured.conversation[mask]),
        )
    (cached, cached_error), (uncached, uncached_error) = sides["cached"], sides["uncached"]
    apart = cached - uncached > 2 * SURE * math.hypot(cached_error, uncached_error)
    if cached > 2 * policy.cusum_slack and uncached < policy.cusum_slack and apart:
        return (
            f"engine: only requests with a cached prompt lose ({cached:.2f} sd, {uncached:.2f} sd without); "
            "flush the cache and look again"
        )
    return None


def _figures(rates: Rates | None) -> dict[str, float | None]:
    if rates is None:
        return {"engine_requests": 0.0}
    return {
        "engine_requests": float(rates.requests),
        "engine_live_rate": rates.live,
        "engine_walked_rate": rates.walked,
        "engine_baseline_rate": rates.baseline,
    }


def _go_on(report: DriftReport, reason: str, figures: Mapping[str, float | None]) -> DriftReport:
    return report.model_copy(update={"reasons": (*report.reasons, reason), "figures": {**report.figures, **figures}})


def _watch(report: DriftReport, reason: str, figures: Mapping[str, float | None]) -> DriftReport:
    return report.model_copy(
        update={
            "decision": "watch",
            "cause": "engine",
            "reasons": (reason, *report.reasons),
            "figures": {**report.figures, **figures},
        }
    )
