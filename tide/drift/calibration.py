"""How high a sum of losses climbs when nothing changed: the alarm threshold that a draft's own baseline asks for.

Owns the CUSUM path and its block bootstrap: whole conversations are drawn, as requests of one are alike and make the
sum climb further than independent ones would. Knows nothing of regimes, inputs or decisions; the seed is an argument.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tide.states.request_stats import Floats, Words

STREAMS = 1000
_REQUESTS = 1_000_000
"""At most so many requests are drawn in all: a long horizon is calibrated on fewer streams."""


def cusum(losses: Floats, start: float = 0.0) -> Floats:
    """[..., n] one-sided cumulative sums S_i = max(0, S_{i-1} + loss_i) along the last axis (Page 1954)."""
    total = np.cumsum(losses, axis=-1)
    path: Floats = total + np.maximum(start, -np.minimum.accumulate(total, axis=-1))
    return path


def alarm_threshold(
    losses: Floats, conversations: Words, *, horizon: int, rate: float, seed: int, error: float = 0.0
) -> float:
    """The sum that resampled streams of the baseline's own losses pass with a given probability.

    Args:
        losses: [n] in standard deviations, slack taken off, as the rule will sum them.
        conversations: [n] which requests stand together.
        horizon: requests of a stream.
        rate: share of streams that may pass it.
        error: standard error of the mean loss; every stream is that much off its baseline, by chance.
    """
    streams = max(min(STREAMS, _REQUESTS // horizon), 1)
    rng = np.random.default_rng(seed)
    drawn = losses[_draw(conversations, streams * horizon, rng)].reshape(streams, horizon)
    off = error * rng.standard_normal((streams, 1))
    return float(np.quantile(cusum(drawn + off).max(axis=1), 1 - rate, method="higher"))


def mean_error(values: Floats, conversations: Words) -> float:
    """Standard error of a mean whose conversations are independent and whose requests are not.

    One conversation says nothing of another: their mean is then as unsure as one request.
    """
    names, member = np.unique(conversations, return_inverse=True)
    if len(names) < 2:
        return float(values.std())
    sums = np.bincount(member, values - values.mean(), len(names))
    return float(np.sqrt((sums**2).sum() * len(names) / (len(names) - 1)) / len(values))


def _draw(conversations: Words, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """[count] places of requests, conversation after conversation, drawn with replacement."""
    _, member = np.unique(conversations, return_inverse=True)
    sizes = np.bincount(member)
    if sizes.max() == 1:
        return rng.integers(0, len(member), count)
    order = np.argsort(member, kind="stable")
    starts = np.cumsum(sizes) - sizes
    chosen = rng.integers(0, len(sizes), int(1.2 * count / sizes.mean()) + 10 * int(sizes.max()))
    while sizes[chosen].sum() < count:
        chosen = np.concatenate([chosen, rng.integers(0, len(sizes), len(chosen))])
    length = sizes[chosen]
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    found: npt.NDArray[np.int64] = order[np.repeat(starts[chosen], length) + within][:count]
    return found
