"""Drift of the acceptance rate: the sum of losses against the frozen baseline, and which requests lost.

Owns the running sum and the groups (context length, cached prompts) that are looked at one by one. Knows nothing of
inputs.
"""

from __future__ import annotations

import math

import numpy as np

from tide.drift.baseline import Baseline, groups_of
from tide.drift.calibration import cusum
from tide.drift.input_shift import SIGNIFICANCE
from tide.drift.state import State
from tide.states.request_stats import RequestStats

CUSUM_MEMORY = 2.0
"""The sum is carried to the next window up to this many thresholds, so that a recovery shows in finite time."""


def accumulate(state: State, baseline: Baseline, measured: RequestStats) -> None:
    """Carry the one-sided CUSUM of losses over the requests not yet counted."""
    fresh = measured.take(measured.finished_at > state.carried("until", baseline.until))
    losses = baseline.losses(fresh) - baseline.slack(fresh, state.policy)
    path = cusum(losses, state.carried("cusum")) if len(fresh) else np.array([state.carried("cusum")])
    calm = fresh.finished_at[path == 0.0] if len(fresh) else np.array([])
    threshold = max(state.policy.cusum_threshold, baseline.alarm)
    state.figures |= {
        "rate": float(measured.accepted.sum() / measured.proposed.sum()) if len(measured) else None,
        "expected_rate": baseline.expected_pooled(measured),
        "cusum": min(float(path[-1]), CUSUM_MEMORY * threshold),
        "cusum_before": state.carried("cusum"),
        "cusum_peak": float(path.max()),
        "cusum_threshold": threshold,
        "until": float(fresh.finished_at[-1]) if len(fresh) else state.carried("until", baseline.until),
        "fresh": float(len(fresh)),
        "loss_since": float(calm[-1]) if len(calm) else state.carried("loss_since", baseline.until),
    }


def check_acceptance(state: State) -> None:
    """Retrain when the sum passed its threshold."""
    figures = state.figures
    peak, threshold, before = (figures[name] or 0.0 for name in ("cusum_peak", "cusum_threshold", "cusum_before"))
    if peak > threshold:
        detail = f"acceptance rate {figures['rate']:.3f} where {figures['expected_rate']:.3f} was the baseline"
        state.retrain(
            "drift", f"cusum: {detail}; sum of losses {peak:.1f} sd passes {threshold:.1f} (was {before:.1f})"
        )


def check_groups(state: State, baseline: Baseline, measured: RequestStats, max_length: int) -> None:
    """The loss of each context-length bucket and of cached prompts; watch a length that lost while the others did not,
    and count what is longer than the draft was trained on.

    Args:
        max_length: tokens of the longest row the incumbent was trained on; 0: unknown.
    """
    losses = baseline.losses(measured)
    for name, mask in groups_of(measured).items():
        loss = float(losses[mask].mean()) - baseline.groups.get(name, 0.0)
        state.figures |= {f"loss_{name}": loss, f"requests_{name}": float(mask.sum())}
        if name.startswith("context") and mask.sum() >= state.policy.min_requests and not mask.all():
            limit = max(2 * state.policy.cusum_slack, SIGNIFICANCE / math.sqrt(mask.sum()))
            if loss > limit and float(losses[~mask].mean()) < loss / 2:
                state.watch(f"{name}: the {int(mask.sum())} requests of this length lose {loss:.2f} sd, others do not")
    longer = int((measured.context > max_length).sum()) if max_length else 0
    state.figures["longer_than_trained"] = float(longer) if max_length else None
    if longer:
        share = f"{longer} of {len(measured)} requests"
        state.reasons.append(f"length: {share} are longer than the {max_length} tokens the draft was trained on")
