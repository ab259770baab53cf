"""The drift rule: whether retraining pays now, from the request table alone: none, watch or retrain, with reasons.

Owns the order of the checks; ``baseline`` holds what they compare with, ``acceptance`` and ``inputs`` are the checks.
Knows nothing of stores, training or reports; times come with the requests. Whether the engine rather than the traffic
lost the acceptance is ``engine_check``'s question, asked of a retrain.

Acceptance is judged by the RATE (accepted over proposed) of each request: a loss of .05 is found in about 90 requests,
while the same loss in acceptance length drowns in its spread. Inputs alone may only cause a retrain when they moved in
consecutive windows: they say that the traffic changed, not that it costs anything.
"""

from __future__ import annotations

import numpy as np

from tide.config import DriftPolicy
from tide.domain import DraftModel, DriftReport
from tide.drift.acceptance import accumulate, check_acceptance, check_groups
from tide.drift.baseline import Baseline, freeze_baseline
from tide.drift.inputs import check_absent, check_inputs
from tide.drift.state import State
from tide.states.request_stats import Bools, RequestStats, stats_from_table

__all__ = ["Baseline", "RequestStats", "decide", "freeze_baseline", "stats_from_table"]


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
    state = State(policy, previous if previous and incumbent and previous.incumbent == incumbent.digest else None)
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


def _bootstrap(state: State, incumbent: DraftModel | None, tokens: int) -> None:
    who = "there is no draft" if incumbent is None else f"draft {incumbent.digest[:12]} was not trained here"
    needed = state.policy.bootstrap_tokens
    if tokens >= needed:
        state.retrain("bootstrap", f"bootstrap: {who}, and {tokens} training tokens are there ({needed} needed)")
    else:
        state.reasons.append(f"bootstrap: {who}; {tokens} of {needed} training tokens are there")


def _warming(state: State, window: RequestStats, incumbent: DraftModel) -> None:
    have, needed = int((window.measured & (window.draft == incumbent.digest)).sum()), state.policy.baseline_requests
    state.figures |= {"measured": float(have)}
    state.reasons.append(f"warming: {have} of {needed} measured requests of draft {incumbent.digest[:12]} so far")


def _judge(
    state: State, baseline: Baseline, window: RequestStats, incumbent: DraftModel, tokens_available: int
) -> None:
    window = window.take(window.finished_at > baseline.until)
    own = window.draft == incumbent.digest
    measured = window.take(own & window.measured)
    _count(state, window, own, len(measured))
    accumulate(state, baseline, measured)
    if len(measured) < state.policy.min_requests:
        state.reasons.append(f"min_requests: {len(measured)} measured requests, {state.policy.min_requests} are needed")
        state.figures |= {name: state.carried(name) for name in ("input_streak", "window_until")}
        return
    check_acceptance(state)
    check_inputs(state, baseline, window)
    check_absent(state, baseline, window.take(own))
    _check_headroom(state, incumbent, tokens_available)
    check_groups(state, baseline, measured, incumbent.max_length)
    if state.decision == "none":
        state.reasons.insert(0, "stable: acceptance and inputs are as they were after the promotion")


def _count(state: State, window: RequestStats, own: Bools, measured: int) -> None:
    """How many requests there are, and how many of them say nothing; they are left out, not taken for 0."""
    unmeasured = int(own.sum()) - measured
    state.figures |= {
        "requests": float(len(window)),
        "window_from": float(window.finished_at[0]) if len(window) else None,
        "measured": float(measured),
        "unmeasured": float(unmeasured),
        "mixed": float((window.draft == "mixed").sum()),
        "other_drafts": float((~own & (window.draft != "mixed")).sum()),
    }
    if unmeasured > measured and unmeasured >= state.policy.min_requests:
        state.watch(f"unmeasured: {unmeasured} of {int(own.sum())} requests have no counters; look at the engine")


def _check_headroom(state: State, incumbent: DraftModel, available: int) -> None:
    needed = state.policy.growth_factor * incumbent.trained_tokens
    if 0 < needed <= available:
        detail = f"{available} tokens since it was trained on {incumbent.trained_tokens}"
        state.retrain("headroom", f"headroom: {detail}; {state.policy.growth_factor:g} times as many are enough")
