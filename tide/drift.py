"""The drift rule: whether retraining pays now, from the request table alone: none, watch or retrain, with reasons.

Owns the decision; ``baseline`` holds what it compares with, ``input_shift`` the input signals. Knows nothing of
stores, training or reports; times come with the requests.

Acceptance is judged by the RATE (accepted over proposed) of each request: a loss of .05 is found in about 90 requests,
while the same loss in acceptance length drowns in its spread. Inputs alone may only cause a retrain when they moved in
consecutive windows: they say that the traffic changed, not that it costs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tide.baseline import Baseline, freeze_baseline
from tide.config import DriftPolicy
from tide.domain import DraftModel, DriftReport
from tide.input_shift import Shift, shifts
from tide.request_stats import Bools, RequestStats, stats_from_table

__all__ = ["Baseline", "RequestStats", "decide", "freeze_baseline", "stats_from_table"]

Decision = Literal["none", "watch", "retrain"]
Cause = Literal["drift", "bootstrap", "headroom"]

CUSUM_MEMORY = 2.0
"""The sum is carried to the next window up to this many thresholds, so that a recovery shows in finite time."""


def decide(
    baseline: Baseline | None,
    window: RequestStats,
    policy: DriftPolicy,
    *,
    incumbent: DraftModel | None,
    trained_tokens_available: int,
    previous: DriftReport | None = None,
    states_commit: str = "",
) -> DriftReport:
    """Whether to retrain.

    Args:
        baseline: of the incumbent (see ``freeze_baseline``); None while it is warming.
        window: the requests to judge. Those that the baseline or the previous report already counted may be among
            them and are not counted twice.
        incumbent: the draft in serving; None when there is none.
        trained_tokens_available: training rows captured since the incumbent was trained; all there are when it was
            not trained by us.
        previous: the report before this one; carries the running sum and the number of windows in which inputs moved.
        states_commit: recorded with the report.
    """
    state = _State(policy, previous if previous and incumbent and previous.incumbent == incumbent.digest else None)
    state.figures["tokens_available"] = float(trained_tokens_available)
    if incumbent is None or incumbent.imported:
        _bootstrap(state, incumbent, trained_tokens_available)
    elif baseline is None or baseline.draft != incumbent.digest:
        _warming(state, window, incumbent)
    else:
        _judge(state, baseline, window, incumbent, trained_tokens_available)
    return DriftReport(
        decision=state.decision,
        cause=state.cause,
        reasons=tuple(state.reasons),
        figures=state.figures,
        incumbent=incumbent.digest if incumbent else "none",
        states_commit=states_commit,
    )


def window_of(
    stats: RequestStats, policy: DriftPolicy, *, incumbent: DraftModel | None, previous: DriftReport | None
) -> RequestStats:
    """The requests that a look judges: all since the look before, and never fewer than the rule needs.

    Args:
        stats: requests since the incumbent's promotion.
    """
    same = previous is not None and incumbent is not None and previous.incumbent == incumbent.digest
    until = previous.figures.get("until") if same and previous else None
    return stats.newest(-np.inf if until is None else until, policy.min_requests)


@dataclass
class _State:
    """The report in the making."""

    policy: DriftPolicy
    previous: DriftReport | None
    decision: Decision = "none"
    cause: Cause | None = None
    reasons: list[str] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)

    def carried(self, name: str, otherwise: float = 0.0) -> float:
        value = self.previous.figures.get(name) if self.previous else None
        return otherwise if value is None else value

    def retrain(self, cause: Cause, reason: str) -> None:
        self.reasons.append(reason)
        if self.decision != "retrain":
            self.decision, self.cause = "retrain", cause

    def watch(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.decision == "none":
            self.decision = "watch"


def _bootstrap(state: _State, incumbent: DraftModel | None, tokens: int) -> None:
    who = "there is no draft" if incumbent is None else f"draft {incumbent.digest[:12]} was not trained here"
    needed = state.policy.bootstrap_tokens
    if tokens >= needed:
        state.retrain("bootstrap", f"bootstrap: {who}, and {tokens} training tokens are there ({needed} needed)")
    else:
        state.reasons.append(f"bootstrap: {who}; {tokens} of {needed} training tokens are there")


def _warming(state: _State, window: RequestStats, incumbent: DraftModel) -> None:
    have, needed = int((window.measured & (window.draft == incumbent.digest)).sum()), state.policy.baseline_requests
    state.figures |= {"measured": float(have)}
    state.reasons.append(f"warming: {have} of {needed} measured requests of draft {incumbent.digest[:12]} so far")


def _judge(
    state: _State, baseline: Baseline, window: RequestStats, incumbent: DraftModel, tokens_available: int
) -> None:
    window = window.take(window.finished_at > baseline.until)
    own = window.draft == incumbent.digest
    measured = window.take(own & window.measured)
    _count(state, window, own, len(measured))
    sum_before = state.carried("cusum")
    peak = _accumulate(state, baseline, measured)
    if len(measured) < state.policy.min_requests:
        state.reasons.append(f"min_requests: {len(measured)} measured requests, {state.policy.min_requests} are needed")
        state.figures |= {name: state.carried(name) for name in ("input_streak", "window_until")}
        return
    _check_acceptance(state, peak, sum_before)
    _check_inputs(state, shifts(baseline.signals, window, min_requests=state.policy.min_requests), window)
    _check_headroom(state, incumbent, tokens_available)
    if not state.reasons:
        state.reasons.append("stable: acceptance and inputs are as they were after the promotion")


def _count(state: _State, window: RequestStats, own: Bools, measured: int) -> None:
    """How many requests there are, and how many of them say nothing; they are left out, not taken for 0."""
    unmeasured = int(own.sum()) - measured
    state.figures |= {
        "requests": float(len(window)),
        "measured": float(measured),
        "unmeasured": float(unmeasured),
        "mixed": float((window.draft == "mixed").sum()),
        "other_drafts": float((~own & (window.draft != "mixed")).sum()),
    }
    if unmeasured > measured and unmeasured >= state.policy.min_requests:
        state.watch(f"unmeasured: {unmeasured} of {int(own.sum())} requests have no counters; look at the engine")


def _accumulate(state: _State, baseline: Baseline, measured: RequestStats) -> float:
    """Carry the one-sided CUSUM of losses over the requests not yet counted; returns its peak."""
    fresh = measured.take(measured.finished_at > state.carried("until", baseline.until))
    losses = -baseline.standardised(fresh) - state.policy.cusum_slack
    start = state.carried("cusum")
    total = np.cumsum(losses)
    path = total + np.maximum(start, -np.minimum.accumulate(total)) if len(total) else np.array([start])
    limit = CUSUM_MEMORY * state.policy.cusum_threshold
    state.figures |= {
        "rate": float(measured.accepted.sum() / measured.proposed.sum()) if len(measured) else None,
        "expected_rate": baseline.expected_pooled(measured),
        "cusum": min(float(path[-1]), limit),
        "cusum_peak": float(path.max()),
        "until": float(fresh.finished_at[-1]) if len(fresh) else state.carried("until", baseline.until),
        "fresh": float(len(fresh)),
    }
    return float(path.max())


def _check_acceptance(state: _State, peak: float, before: float) -> None:
    threshold = state.policy.cusum_threshold
    if peak > threshold:
        rate, expected = state.figures["rate"], state.figures["expected_rate"]
        detail = f"acceptance rate {rate:.3f} where {expected:.3f} was the baseline"
        state.retrain(
            "drift", f"cusum: {detail}; sum of losses {peak:.1f} sd passes {threshold:.1f} (was {before:.1f})"
        )


def _check_inputs(state: _State, found: Mapping[str, Shift], window: RequestStats) -> None:
    policy = state.policy
    limits = {"tokens": policy.input_js_threshold, "script": policy.script_js_threshold}
    moved = []
    for name, shift in found.items():
        state.figures[f"{name}_js"] = shift.distance
        limit = limits.get(name, policy.length_js_threshold)
        if shift.significant and shift.distance > limit:
            moved.append(f"{name} {shift.distance:.3f} > {limit:.3f}")
    # Only a window that is mostly new is one more window in a row: two looks at the same requests are one finding.
    judged = state.carried("window_until")
    new = int((window.finished_at > judged).sum()) >= policy.min_requests
    streak = state.carried("input_streak") + 1 if new else max(state.carried("input_streak"), 1.0)
    state.figures |= {
        "input_streak": streak if moved else 0.0,
        "window_until": float(window.finished_at.max()) if new else judged,
    }
    if not moved:
        return
    reason = f"inputs: {', '.join(moved)} (Jensen-Shannon), in {streak:.0f} of {policy.consecutive_windows} windows"
    if streak >= policy.consecutive_windows:
        state.retrain("drift", reason)
    else:
        state.watch(reason)


def _check_headroom(state: _State, incumbent: DraftModel, available: int) -> None:
    needed = state.policy.growth_factor * incumbent.trained_tokens
    if 0 < needed <= available:
        detail = f"{available} tokens since it was trained on {incumbent.trained_tokens}"
        state.retrain("headroom", f"headroom: {detail}; {state.policy.growth_factor:g} times as many are enough")
