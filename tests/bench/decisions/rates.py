"""A rate of trials with its binomial interval, as the decision benchmarks report it."""

from __future__ import annotations

from typing import Any

from scipy.stats import beta


def rate(hits: int, trials: int) -> dict[str, Any]:
    """Hits over trials with the Clopper-Pearson interval of 95%."""
    low = float(beta.ppf(0.025, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, trials - hits)) if hits < trials else 1.0
    share = hits / trials if trials else None
    return {"rate": share, "k": hits, "n": trials, "low": round(low, 4), "high": round(high, 4)}
