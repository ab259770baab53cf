"""Drift of the inputs: distances of a window from the baseline's requests, and what of it is missing.

Owns how many windows in a row count. Knows nothing of acceptance.
"""

from __future__ import annotations

import math

from tide.drift.baseline import Baseline, absent_shares
from tide.drift.input_shift import SIGNIFICANCE, Shift, shifts
from tide.drift.state import State
from tide.drift.state_shift import state_shift
from tide.states.request_stats import RequestStats


def check_inputs(state: State, baseline: Baseline, window: RequestStats) -> None:
    """Watch when inputs moved, retrain when they did in enough windows in a row.

    Args:
        window: all requests behind the baseline, measured or not: inputs are there without counters too.
    """
    moved = _moved(state, _found(state, baseline, window))
    streak = _streak(state, window, bool(moved))
    if not moved:
        return
    reason = f"inputs: {', '.join(moved)}, in {streak:.0f} of {state.policy.consecutive_windows} windows"
    if streak >= state.policy.consecutive_windows:
        state.retrain("drift", reason)
    else:
        state.watch(reason)


def check_absent(state: State, baseline: Baseline, window: RequestStats) -> None:
    """Watch when more requests than at the baseline come without a signal: what is not there cannot drift."""
    for name, share in absent_shares(window).items():
        before = baseline.absent[name]
        state.figures[f"{name}_absent"] = share
        error = math.sqrt(share * (1 - share) / len(window) + before * (1 - before) / baseline.requests)
        if share - before > max(state.policy.absent_threshold, SIGNIFICANCE * error):
            state.watch(f"absent: {share:.0%} of requests have no {name}, {before:.0%} at the baseline")


def _found(state: State, baseline: Baseline, window: RequestStats) -> dict[str, Shift]:
    needed, limit = state.policy.min_requests, state.policy.pooled_mmd_threshold
    found = shifts(baseline.signals, window, min_requests=needed)
    if baseline.states and (shift := state_shift(baseline.states, window, min_requests=needed, limit=limit)):
        found["pooled"] = shift
    return found


def _moved(state: State, found: dict[str, Shift]) -> list[str]:
    policy = state.policy
    limits = {"tokens": policy.input_js_threshold, "script": policy.script_js_threshold}
    limits |= {"pooled": policy.pooled_mmd_threshold}
    moved = []
    for name, shift in found.items():
        measure = "mmd" if name == "pooled" else "js"
        state.figures[f"{name}_{measure}"] = shift.distance
        limit = limits.get(name, policy.length_js_threshold)
        if shift.significant and shift.distance > limit:
            moved.append(f"{name} {shift.distance:.3f} > {limit:.3f} ({measure.upper()})")
    return moved


def _streak(state: State, window: RequestStats, moved: bool) -> float:
    """Windows in a row in which inputs moved; 0 when they did not.

    Only a window that is mostly new is one more in a row: two looks at the same requests are one finding.
    """
    judged = state.carried("window_until")
    new = int((window.finished_at > judged).sum()) >= state.policy.min_requests
    streak = state.carried("input_streak") + 1 if new else max(state.carried("input_streak"), 1.0)
    state.figures |= {
        "input_streak": streak if moved else 0.0,
        "window_until": float(window.finished_at.max()) if new else judged,
    }
    return streak
