"""Whether the inputs of a window differ from a frozen reference: Jensen-Shannon distances corrected for sampling noise.

Owns the histograms (hashed tokens, lengths, script) and the noise that split halves of the reference show; pooled
states are ``state_shift``'s. Knows nothing of drafts, acceptance or decisions.

Two finite samples of one distribution are never at distance 0, and the smaller they are the further apart. The
divergence of split halves of the reference measures that noise, topics of whole conversations included; it scales
as 1/n + 1/m, so it can be subtracted for any window. A window is compared with the reference at the window's own mix
of slices: night traffic with more code in it is no shift when code was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tide.domain import Record
from tide.drift.strata import REST, known, strata
from tide.states.request_stats import Bools, Floats, RequestStats

SPLITS = 50
"""Random halvings of the reference that the noise is taken from."""
SIGNIFICANCE = 4.0
"""Standard deviations of the noise that a divergence must exceed, beside the effect size."""
MIN_CONVERSATIONS = 4
_LENGTH_BUCKETS = 25


class Signal(Record):
    """One input signal of the reference."""

    counts: dict[str, dict[str, float]]
    """Histogram by slice; ``*`` is that of all."""
    requests: dict[str, int]
    """How many each is made of."""
    noise: float
    """Expected divergence (bits) of two samples of n and m requests is noise * (1/n + 1/m)."""
    noise_sd: float


class Shift(Record):
    """How far a window is from the reference on one signal."""

    distance: float
    """0..1, after the noise was taken off: Jensen-Shannon of histograms, square root of MMD^2 of pooled states."""
    significant: bool


def _script(stats: RequestStats) -> tuple[Floats, list[str]]:
    labels, index = np.unique(stats.script, return_inverse=True)
    return np.eye(len(labels))[index], [str(label) for label in labels]


def _lengths(tokens: Floats) -> tuple[Floats, list[str]]:
    bucket = np.clip(np.floor(np.log2(np.maximum(tokens, 1.0))), 0, _LENGTH_BUCKETS - 1).astype(np.int64)
    return np.eye(_LENGTH_BUCKETS)[bucket], [str(i) for i in range(_LENGTH_BUCKETS)]


def _tokens(stats: RequestStats) -> tuple[npt.NDArray[np.uint16], list[str]]:
    return stats.sketch, [str(i) for i in range(stats.sketch.shape[1])]


SIGNALS: Mapping[str, Callable[[RequestStats], tuple[npt.NDArray[Any], list[str]]]] = {
    "tokens": _tokens,
    "prompt_length": lambda stats: _lengths(stats.prompt_tokens),
    "response_length": lambda stats: _lengths(stats.response_tokens),
    "script": _script,
}
"""Histogram of each request, [requests, labels], and the labels. Empty ones are left out by who compares."""


def carrying(stats: RequestStats, name: str) -> RequestStats:
    """The requests that a signal can be taken of."""
    return stats.take(stats.has_sketch) if name == "tokens" else stats


def reference(stats: RequestStats, *, seed: int) -> dict[str, Signal]:
    """Freeze the input signals of some requests; a signal that fewer than 4 conversations carry is left out."""
    found = {}
    for name, histogram in SIGNALS.items():
        carriers = carrying(stats, name)
        if len(np.unique(carriers.conversation)) < MIN_CONVERSATIONS:
            continue
        rows, labels = histogram(carriers)
        masks = dict(strata(carriers.slice, known(carriers.slice))) | {REST: np.ones(len(rows), dtype=np.bool_)}
        noise = _halves(rows, carriers.conversation, np.random.default_rng(seed))
        found[name] = Signal(
            counts={slice: _counts(rows[mask], labels) for slice, mask in masks.items()},
            requests={slice: int(mask.sum()) for slice, mask in masks.items()},
            noise=float(noise.mean()),
            noise_sd=float(noise.std()),
        )
    return found


def shifts(signals: Mapping[str, Signal], window: RequestStats, *, min_requests: int) -> dict[str, Shift]:
    """Distance of a window from the reference, for each signal that enough of its requests carry."""
    found = {}
    for name, signal in signals.items():
        carriers = carrying(window, name)
        if len(carriers) < min_requests:
            continue
        rows, labels = SIGNALS[name](carriers)
        masks = dict(strata(carriers.slice, [s for s in signal.requests if s != REST]))
        found[name] = _compare(signal, rows.sum(axis=0, dtype=np.float64), labels, masks)
    return found


def _compare(signal: Signal, counts: Floats, labels: list[str], masks: Mapping[str, Bools]) -> Shift:
    """A window's histogram against the reference's at the window's mix of slices."""
    names = sorted(signal.counts[REST].keys() | set(labels))
    place = {label: i for i, label in enumerate(names)}
    ours, theirs, spread = np.zeros(len(names)), np.zeros(len(names)), 0.0
    ours[[place[label] for label in labels]] = counts
    sizes = {slice: float(mask.sum()) for slice, mask in masks.items()}
    for slice, size in sizes.items():
        own = signal.counts[slice]
        theirs[[place[label] for label in own]] += np.array(list(own.values())) * size / signal.requests[slice]
        spread += size**2 / signal.requests[slice]
    total = sum(sizes.values())
    divergence, samples = float(divergences(ours[None], theirs[None])[0]), 1 / total + spread / total**2
    return Shift(
        distance=float(np.sqrt(max(divergence - signal.noise * samples, 0.0))),
        significant=divergence > (signal.noise + SIGNIFICANCE * signal.noise_sd) * samples,
    )


def divergences(left: Floats, right: Floats) -> Floats:
    """[n] Jensen-Shannon divergence in bits, 0..1, of the rows of two [n, labels] count matrices."""
    p, q = left / left.sum(axis=1, keepdims=True), right / right.sum(axis=1, keepdims=True)
    middle = (p + q) / 2
    parts = [np.where(x > 0, x * np.log2(np.where(x > 0, x, 1.0) / np.where(x > 0, middle, 1.0)), 0.0) for x in (p, q)]
    return np.clip((parts[0].sum(axis=1) + parts[1].sum(axis=1)) / 2, 0.0, 1.0)


def _counts(rows: npt.NDArray[Any], labels: list[str]) -> dict[str, float]:
    sums = rows.sum(axis=0, dtype=np.float64)
    return {label: float(count) for label, count in zip(labels, sums, strict=True) if count}


def _halves(rows: npt.NDArray[Any], conversations: npt.NDArray[np.str_], rng: np.random.Generator) -> Floats:
    """[SPLITS] divergences of random halves of the conversations, each over its 1/n + 1/m."""
    names, member = np.unique(conversations, return_inverse=True)
    order = np.argsort(rng.random((SPLITS, len(names))), axis=1)
    side: npt.NDArray[np.float64] = (order < len(names) // 2).astype(np.float64)[:, member]
    rows = rows.astype(np.float64)
    left, size = side @ rows, side.sum(axis=1)
    return divergences(left, rows.sum(axis=0) - left) / (1 / size + 1 / (len(rows) - size))
