"""Whether the inputs of a window differ from a frozen reference: Jensen-Shannon distances corrected for sampling noise.

Owns the histograms (hashed tokens, lengths, script) and the noise that split halves of the reference show. Knows
nothing of drafts, acceptance or decisions.

Two finite samples of one distribution are never at distance 0, and the smaller they are the further apart. The
divergence of split halves of the reference measures that noise, requests with topics of their own included; it scales
as 1/n + 1/m, so it can be subtracted for any window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tide.domain import Record
from tide.request_stats import Floats, RequestStats

SPLITS = 50
"""Random halvings of the reference that the noise is taken from."""
SIGNIFICANCE = 4.0
"""Standard deviations of the noise that a divergence must exceed, beside the effect size."""
_LENGTH_BUCKETS = 25


class Signal(Record):
    """One input signal of the reference."""

    counts: dict[str, float]
    requests: int
    noise: float
    """Expected divergence (bits) of two samples of n and m requests is noise * (1/n + 1/m)."""
    noise_sd: float


class Shift(Record):
    """How far a window is from the reference on one signal."""

    distance: float
    """Jensen-Shannon distance, 0..1, after the noise was taken off."""
    significant: bool


def _script(stats: RequestStats) -> tuple[Floats, list[str]]:
    labels, index = np.unique(stats.script, return_inverse=True)
    return np.eye(len(labels))[index], [str(label) for label in labels]


def _lengths(tokens: Floats) -> tuple[Floats, list[str]]:
    bucket = np.clip(np.floor(np.log2(np.maximum(tokens, 1.0))), 0, _LENGTH_BUCKETS - 1).astype(np.int64)
    return np.eye(_LENGTH_BUCKETS)[bucket], [str(i) for i in range(_LENGTH_BUCKETS)]


def _tokens(stats: RequestStats) -> tuple[Floats, list[str]]:
    rows = stats.sketch[stats.sketch.any(axis=1)].astype(np.float64)
    return rows, [str(i) for i in range(stats.sketch.shape[1])]


SIGNALS: Mapping[str, Callable[[RequestStats], tuple[Floats, list[str]]]] = {
    "tokens": _tokens,
    "prompt_length": lambda stats: _lengths(stats.prompt_tokens),
    "response_length": lambda stats: _lengths(stats.response_tokens),
    "script": _script,
}
"""Histogram of each request, [requests, labels], and the labels. Requests without the signal are left out."""


def reference(stats: RequestStats, *, seed: int) -> dict[str, Signal]:
    """Freeze the input signals of some requests; a signal that fewer than 4 requests carry is left out."""
    found = {}
    for name, histogram in SIGNALS.items():
        rows, labels = histogram(stats)
        if len(rows) < 4:
            continue
        halves = _halves(rows, np.random.default_rng(seed)) * len(rows) / 4
        counts = {label: float(count) for label, count in zip(labels, rows.sum(axis=0), strict=True) if count}
        found[name] = Signal(
            counts=counts, requests=len(rows), noise=float(halves.mean()), noise_sd=float(halves.std())
        )
    return found


def shifts(signals: Mapping[str, Signal], window: RequestStats, *, min_requests: int) -> dict[str, Shift]:
    """Distance of a window from the reference, for each signal that enough of its requests carry."""
    found = {}
    for name, signal in signals.items():
        rows, labels = SIGNALS[name](window)
        if len(rows) < min_requests:
            continue
        names = sorted(signal.counts.keys() | set(labels))
        place = {label: i for i, label in enumerate(names)}
        ours = np.zeros(len(names))
        ours[[place[label] for label in labels]] = rows.sum(axis=0)
        theirs = np.array([signal.counts.get(label, 0.0) for label in names])
        divergence = float(divergences(ours[None], theirs[None])[0])
        samples = 1 / len(rows) + 1 / signal.requests
        found[name] = Shift(
            distance=float(np.sqrt(max(divergence - signal.noise * samples, 0.0))),
            significant=divergence > (signal.noise + SIGNIFICANCE * signal.noise_sd) * samples,
        )
    return found


def divergences(left: Floats, right: Floats) -> Floats:
    """[n] Jensen-Shannon divergence in bits, 0..1, of the rows of two [n, labels] count matrices."""
    p, q = left / left.sum(axis=1, keepdims=True), right / right.sum(axis=1, keepdims=True)
    middle = (p + q) / 2
    parts = [np.where(x > 0, x * np.log2(np.where(x > 0, x, 1.0) / np.where(x > 0, middle, 1.0)), 0.0) for x in (p, q)]
    return np.clip((parts[0].sum(axis=1) + parts[1].sum(axis=1)) / 2, 0.0, 1.0)


def _halves(rows: Floats, rng: np.random.Generator) -> Floats:
    """[SPLITS] divergences of random halves."""
    order = np.argsort(rng.random((SPLITS, len(rows))), axis=1)
    side: npt.NDArray[np.float64] = (order < len(rows) // 2).astype(np.float64)
    left = side @ rows
    return divergences(left, rows.sum(axis=0) - left)
