"""How often the drift gate is wrong: false alarms, losses found and how soon, beside the published EMA rule.

Every trial draws a baseline and streams of the corpus's conversations (``traffic``) and asks the gate the service runs,
window by window, with the report before. Run: ``python -m tests.bench.decisions.drift [trials]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from scipy.signal import lfilter
from scipy.stats import beta

from tests.bench.decisions.traffic import DRAFT, Pool, pools, stream, with_loss
from tests.support.traffic_stats import draft_model
from tide.config import DriftPolicy
from tide.domain import DriftReport
from tide.drift import rule as drift
from tide.drift.baseline import Baseline
from tide.drift.calibration import cusum
from tide.states.request_stats import RequestStats

STREAM, WINDOW, RAMP, RAMP_WINDOW = 900, 100, 2500, 250
SIZES = {500: 100, 5_000: 100, 50_000: 20}
"""Draws of one size from one distribution, by size, at 500 trials."""
LOSS, RAMP_LOSS, MIX_MOVE = 0.05, 0.15, 0.10
SHORT, LONG, EMA_EPS = 0.95, 0.995, 0.08
"""The published rule: two exponential means of the acceptance rate; it fires when the short one is this far below."""


def measure(trials: int = 500, *, seed: int = 0, policy: DriftPolicy | None = None) -> dict[str, Any]:
    """Figures of ``drift.*``; see the module."""
    policy, drafts = policy or DriftPolicy(), sorted(pools())
    rows = _parallel(_trial, trials, policy, seed)
    windows = _parallel(_windows, max(trials // 10, 1), policy, seed + 1)
    flags = {n: _parallel(partial(_flag, n), max(k * trials // 500, 1), policy, seed + 2) for n, k in SIZES.items()}
    delays = [row["delay"] for row in rows if np.isfinite(row["delay"])]
    found = {name: rate([row[name] for row in rows]) for name in rows[0] if name != "delay"}
    return {
        "drift": {
            **found,
            "false_alarm_per_100_windows": rate([hit for hits in windows for hit in hits])
            | {"window_requests": policy.min_requests, "streams": len(windows)},
            "median_delay": float(np.median(delays)) if delays else None,
            "input_flags": {str(n): rate(hits) for n, hits in flags.items()},
            "drafts": drafts,
            "policy": policy.model_dump(mode="json"),
        }
    }


def _parallel(
    job: Callable[[Pool, DriftPolicy, np.random.Generator], Any], count: int, policy: DriftPolicy, seed: int
) -> list[Any]:
    """What a job gives so many times, on the drafts by turn; the same for the same seed on any number of cores."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        return list(workers.map(partial(_once, job, policy, seed), range(count), chunksize=4))


def _once(
    job: Callable[[Pool, DriftPolicy, np.random.Generator], Any], policy: DriftPolicy, seed: int, turn: int
) -> Any:
    drafts = _pools()
    return job(drafts[turn % len(drafts)], policy, np.random.default_rng([seed, turn]))


@lru_cache(maxsize=1)
def _pools() -> list[Pool]:
    return [pool for _, pool in sorted(pools().items())]


def rate(hits: list[bool]) -> dict[str, Any]:
    """Share of trials with its exact (Clopper-Pearson) 95% interval."""
    n, k = len(hits), int(sum(hits))
    low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    high = float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
    return {"rate": k / n, "low": low, "high": high, "trials": n}


def _trial(pool: Pool, policy: DriftPolicy, rng: np.random.Generator) -> dict[str, Any]:
    phase, start = rng.random(), float(policy.baseline_requests)
    first = stream(pool, policy.baseline_requests, rng, phase=phase)
    baseline = _freeze(first, policy)
    mean = float(np.mean(first.rate))

    def draw(count: int, mix_move: float = 0.0) -> RequestStats:
        return stream(pool, count, rng, start=start, phase=phase, mix_move=mix_move)

    null, lost = draw(STREAM), with_loss(draw(STREAM), LOSS / pool.rate, rng)
    ramp = with_loss(draw(RAMP), np.linspace(0, RAMP_LOSS / pool.rate, RAMP), rng)
    mixed = with_loss(draw(STREAM, MIX_MOVE), LOSS / pool.rate, rng)
    return {
        "false_alarm_per_900": _asks(baseline, null, policy),
        "found_abrupt": _asks(baseline, lost, policy),
        "found_ramp": _asks(baseline, ramp, policy, RAMP_WINDOW),
        "found_mix": _asks(baseline, mixed, policy),
        "delay": _delay(baseline, lost, policy),
        "ema_false_alarm_per_900": _ema_fires(null, mean),
        "ema_found_abrupt": _ema_fires(lost, mean),
        "ema_found_ramp": _ema_fires(ramp, mean),
    }


def _windows(pool: Pool, policy: DriftPolicy, rng: np.random.Generator) -> list[bool]:
    """Whether each of 100 harvest windows of unchanged traffic asks for a draft."""
    phase = rng.random()
    baseline = _freeze(stream(pool, policy.baseline_requests, rng, phase=phase), policy)
    after = stream(pool, 100 * policy.min_requests, rng, start=float(policy.baseline_requests), phase=phase)
    return [report.decision == "retrain" for report in _looks(baseline, after, policy, policy.min_requests)]


def _flag(count: int, pool: Pool, policy: DriftPolicy, rng: np.random.Generator) -> bool:
    """Whether a draw of this size from the baseline's own distribution counts as moved inputs."""
    baseline = _freeze(stream(pool, policy.baseline_requests, rng), policy)
    window = stream(pool, count, rng, start=float(policy.baseline_requests))
    return bool(next(_looks(baseline, window, policy, count)).figures["input_streak"])


def _freeze(first: RequestStats, policy: DriftPolicy) -> Baseline:
    baseline = drift.freeze_baseline(first, policy, draft=DRAFT)
    assert baseline is not None
    return baseline


def _looks(baseline: Baseline, stats: RequestStats, policy: DriftPolicy, window: int) -> Iterator[DriftReport]:
    """The gate's reports, one a window, each with the one before."""
    report = None
    for begin in range(0, len(stats), window):
        rows = np.zeros(len(stats), dtype=np.bool_)
        rows[begin : begin + window] = True
        report = drift.decide(
            baseline, stats.take(rows), policy, incumbent=INCUMBENT, trained_tokens_available=0, previous=report
        )
        yield report


def _asks(baseline: Baseline, stats: RequestStats, policy: DriftPolicy, window: int = WINDOW) -> bool:
    return any(report.decision == "retrain" for report in _looks(baseline, stats, policy, window))


def _delay(baseline: Baseline, stats: RequestStats, policy: DriftPolicy) -> float:
    """Requests until the sum of losses passes its threshold, as if the gate looked after every request."""
    path = cusum(baseline.losses(stats) - baseline.slack(stats, policy))
    beyond = np.flatnonzero(path > max(policy.cusum_threshold, baseline.alarm))
    return float(beyond[0] + 1) if len(beyond) else float("inf")


def _ema_fires(stats: RequestStats, start: float) -> bool:
    short, long = (lfilter([1 - d], [1, -d], stats.rate, zi=[d * start])[0] for d in (SHORT, LONG))
    return bool((long - short > EMA_EPS).any())


INCUMBENT = draft_model(digest=DRAFT)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 500), indent=2))
