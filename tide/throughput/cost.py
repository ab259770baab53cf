"""The cost rule: whether the engine time that a retrain is expected to save is worth the training.

Pure: figures in, a decision out. Owns what a retrain is expected to gain, from the acceptance that was lost and from
what earlier retrains brought back. Knows nothing of stores, of training, or of how drift is found.

Saved engine-seconds = tokens/s x horizon x engine-seconds a token x (1 - speed now / speed after). Speedup =
AL / (c g + beta) is linear in AL, and a retrain changes neither c, g nor beta, so the two speeds are as the acceptance
lengths. What a token costs comes from the engine's profile at the service's concurrency where there is one; without one
it is the time the engine was seen busy, which counts prefill as if a draft could speed it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tide.config import CostPolicy
from tide.domain import CostDecision, DriftReport, EngineProfile, Verdict
from tide.throughput import prediction as throughput

Floats = npt.NDArray[np.float64]

_COLUMNS = ("started_at", "finished_at", "response_tokens", "proposed", "verify_steps")


@dataclass(frozen=True)
class Traffic:
    """What a service is asked for, and what it costs its engines."""

    tokens_per_s: float
    """Output tokens a second, idle time included."""
    engine_s_per_token: float
    """Seconds that an engine is busy for each output token."""
    proposed_per_step: float
    """Draft tokens proposed in a verify step: acceptance length is 1 + rate x this."""


@dataclass(frozen=True)
class History:
    """What earlier retrains brought, oldest first."""

    recovered: tuple[float, ...] = ()
    """Share of the lost acceptance that each retrain for drift brought back, 0 to 1."""
    added: tuple[float, ...] = ()
    """Acceptance length that each retrain added beyond what was lost (more tokens, other inputs), at least 0."""


def traffic_of(table: Any, *, since: float, draft: str) -> Traffic | None:
    """Measure the traffic of a request table; None when it says nothing: no request, no token, no counter of the draft.

    Args:
        table: ``pyarrow.Table`` with the columns of `tide.states.requests.REQUEST_SCHEMA`.
        since: requests that finished later count, seconds since the epoch. Time in which any of them runs is busy, so
            engines of several replicas count as one.
        draft: digest of the draft whose verify steps count.
    """
    columns = {name: np.array(table[name].to_numpy(), dtype=np.float64) for name in _COLUMNS}
    late = columns["finished_at"] > since
    started, finished, tokens = (columns[name][late] for name in ("started_at", "finished_at", "response_tokens"))
    own = late & np.array([name == draft for name in table["draft"].to_pylist()], dtype=np.bool_)
    counted = own & np.isfinite(columns["proposed"]) & (np.nan_to_num(columns["verify_steps"]) > 0)
    if not (counted.any() and tokens.sum() > 0 and finished.max() > started.min()):
        return None
    span = float(finished.max() - started.min())
    return Traffic(
        tokens_per_s=float(tokens.sum()) / span,
        engine_s_per_token=(span - _idle(started, finished)) / float(tokens.sum()),
        proposed_per_step=float(columns["proposed"][counted].sum() / columns["verify_steps"][counted].sum()),
    )


def _idle(started: Floats, finished: Floats) -> float:
    """Seconds between the first start and the last finish in which no request ran."""
    order = np.argsort(started, kind="stable")
    reached = np.maximum.accumulate(finished[order])
    return float(np.clip(started[order][1:] - reached[:-1], 0.0, None).sum())


def history(drifts: Sequence[DriftReport], verdicts: Sequence[Verdict], proposed_per_step: float) -> History:
    """What earlier retrains brought: each report that asked for one, with the verdict on what came of it.

    A refused candidate counts as well: what it had not brought back is why it was refused.

    Args:
        drifts, verdicts: oldest first; verdicts on candidates that were trained, not on those of the pool.
    """
    judged = {(verdict.states_commit, verdict.incumbent): verdict for verdict in verdicts}
    # A look may stand in the ledger more than once, as later rules amended it: the last word counts.
    looks = {(report.states_commit, report.incumbent): report for report in drifts}
    recovered, added = [], []
    for key, report in looks.items():
        verdict = judged.get(key)
        if report.decision != "retrain" or verdict is None:
            continue
        gained, lost = max(verdict.overall.difference.estimate, 0.0), _lost(report, proposed_per_step)
        if report.cause == "bootstrap" or lost is None:
            continue
        if lost > 0:
            recovered.append(min(gained / lost, 1.0))
        added.append(max(gained - lost, 0.0))
    return History(tuple(recovered), tuple(added))


def decide(
    report: DriftReport,
    policy: CostPolicy,
    traffic: Traffic | None,
    past: History,
    *,
    steps: int,
    profile: EngineProfile | None = None,
    concurrency: Mapping[int, float] | None = None,
) -> CostDecision:
    """Whether the retrain that a drift report asks for pays.

    Args:
        report: asks for a retrain.
        traffic: of the requests it was made on; None when they say nothing.
        past: see `history`.
        steps: draft steps of a verify step in serving.
        profile, concurrency: step times of the engine, and the share of output tokens by requests running.
    """
    if policy.training_cost is None:
        return _decision(report, "off", "off: cost.training_cost is not set in the policy")
    if report.cause == "bootstrap":
        return _decision(report, "off", "off: a first draft has no baseline that a gain could be expected from")
    rate = report.figures.get("rate")
    if traffic is None or rate is None:
        return _decision(report, "does not pay", "does not pay: no acceptance was measured, so no gain can be expected")
    now = 1.0 + rate * traffic.proposed_per_step
    gain = _expected_gain(report, policy, traffic.proposed_per_step, past)
    seconds, how = traffic.engine_s_per_token, "measured, prefill included"
    if profile is not None and concurrency:
        seconds = throughput.seconds_per_token(profile, now, steps=steps, concurrency=concurrency)
        how = "by the engine's profile"
    ratio = (now + gain) / now
    saved = traffic.tokens_per_s * policy.horizon * seconds * (1 - 1 / ratio)
    cost = policy.training_cost * policy.price_ratio
    verb: Literal["pays", "does not pay"] = "pays" if saved > cost else "does not pay"
    reason = (
        f"{verb}: {now:.3f} to {now + gain:.3f} is expected, {ratio:.3f} times the speed; {policy.horizon:g} s of "
        f"{traffic.tokens_per_s:.1f} tok/s at {seconds:.4f} engine-seconds a token ({how}) would save {saved:.0f}, "
        f"the training costs {cost:.0f}"
    )
    figures = {"length": now, "expected_length": now + gain, "speed_ratio": ratio, "saved_s": saved, "cost_s": cost}
    figures |= {"tokens_per_s": traffic.tokens_per_s, "engine_s_per_token": seconds}
    return _decision(report, verb, reason, figures)


def amend(report: DriftReport, decision: CostDecision) -> DriftReport:
    """The drift report with what the cost rule says of it: a retrain that does not pay becomes ``watch``."""
    reasons = tuple(f"cost: {reason}" for reason in decision.reasons)
    if decision.decision != "does not pay":
        return report.model_copy(update={"reasons": (*report.reasons, *reasons)})
    return report.model_copy(update={"decision": "watch", "cause": None, "reasons": (*reasons, *report.reasons)})


def expected_share(past: Sequence[float], prior: float, weight: float) -> float:
    """Mean of what was seen, drawn towards the prior, which weighs as much as ``weight`` retrains."""
    return (prior * weight + sum(past)) / (weight + len(past))


def _expected_gain(report: DriftReport, policy: CostPolicy, proposed_per_step: float, past: History) -> float:
    """Acceptance length that a retrain is expected to add: part of what was lost, and what it knows beyond that."""
    added = expected_share(past.added, policy.added, policy.prior_weight)
    lost = _lost(report, proposed_per_step) or 0.0
    return lost * expected_share(past.recovered, policy.recovery, policy.prior_weight) + added


def _lost(report: DriftReport, proposed_per_step: float) -> float | None:
    """Acceptance length under the baseline's, at least 0; None when it was not measured."""
    rate, expected = report.figures.get("rate"), report.figures.get("expected_rate")
    return None if rate is None or expected is None else max(expected - rate, 0.0) * proposed_per_step


def _decision(
    report: DriftReport,
    decision: Literal["pays", "does not pay", "off"],
    reason: str,
    figures: Mapping[str, float] | None = None,
) -> CostDecision:
    return CostDecision(
        decision=decision,
        reasons=(reason,),
        figures=dict(figures or {}),
        incumbent=report.incumbent,
        states_commit=report.states_commit,
    )
