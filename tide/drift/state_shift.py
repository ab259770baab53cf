"""Whether the pooled hidden states of a window come from the distribution of a frozen reference: a kernel test.

Owns the kernel, the estimate (unbiased MMD^2: Gretton et al., A Kernel Two-Sample Test, JMLR 2012, lemma 6), its null
distribution by permutation, and the sample of the reference that is kept. Knows nothing of acceptance or decisions.

Permutations exchange whole conversations, within a slice: requests of one conversation are alike, and a change of the
mix between known slices is no shift. At most ``MAX_ROWS`` states of either side are compared, so time and memory are
bounded whatever the window.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tide.domain import Record
from tide.drift.input_shift import MIN_CONVERSATIONS, Shift
from tide.drift.strata import REST, known, strata
from tide.states.request_stats import Floats, RequestStats, Words

MAX_ROWS = 300
"""States kept of the reference, and compared of a window."""
PERMUTATIONS = 400
SIGNIFICANCE = 0.01
"""Share of permutations that may be as far apart as the window is."""


class States(Record):
    """A sample of the reference's pooled states."""

    rows: tuple[tuple[float, ...], ...]
    """[at most MAX_ROWS][64], float32 in origin."""
    slices: tuple[str, ...]
    conversations: tuple[str, ...]
    width: float
    """Of the Gaussian kernel exp(-d^2 / (2 width^2)): the median distance between the reference's states."""
    alike: dict[str, float]
    """Mean kernel of two different states of a slice; ``*`` is that of all."""


def reference_states(stats: RequestStats, *, seed: int) -> States | None:
    """Freeze the pooled states of some requests; None when fewer than 4 conversations have one, or all are equal."""
    kept = _sample(stats.take(stats.has_pooled), np.random.default_rng(seed))
    if len(np.unique(kept.conversation)) < MIN_CONVERSATIONS:
        return None
    squares = _squares(rows := kept.pooled.astype(np.float64), rows)
    width = float(np.sqrt(np.median(squares[np.triu_indices(len(rows), 1)])))
    if width == 0.0:
        return None
    kernel, slices = np.exp(squares / (-2 * width**2)), kept.slice
    masks = {name: slices == name for name in known(slices)} | {REST: np.ones(len(rows), dtype=np.bool_)}
    return States(
        rows=tuple(map(tuple, rows.tolist())),
        slices=tuple(slices.tolist()),
        conversations=tuple(kept.conversation.tolist()),
        width=width,
        alike={name: _alike(kernel[np.ix_(mask, mask)]) for name, mask in masks.items()},
    )


def state_shift(
    reference: States, window: RequestStats, *, min_requests: int, limit: float = 0.0, seed: int = 0
) -> Shift | None:
    """Distance of a window's pooled states from the reference's; None when too few requests carry one.

    Args:
        limit: a distance up to this does not matter, so it is not tested and never significant.
    """
    carriers = window.take(window.has_pooled)
    if len(carriers) < min_requests:
        return None
    rng = np.random.default_rng(seed)
    carriers = _sample(carriers, rng)
    parts = _parts(carriers.slice, np.array(reference.slices, dtype=np.str_))
    ours, theirs = carriers.pooled.astype(np.float64), np.array(reference.rows)
    estimate = _distance(reference, parts, ours, theirs)
    if estimate <= limit**2 or not parts:
        return Shift(distance=math.sqrt(max(estimate, 0.0)), significant=False)
    rows = np.concatenate([ours, theirs])
    kernel = np.exp(_squares(rows, rows) / (-2 * reference.width**2))
    talks = np.concatenate([carriers.conversation, np.array(reference.conversations, dtype=np.str_)])
    beyond, total = np.zeros(PERMUTATIONS), sum(len(mine) for _, mine, _ in parts)
    for _, mine, other in parts:
        place = np.concatenate([mine, len(ours) + other])
        sides = _permuted(len(mine), talks[place], rng)
        beyond += len(mine) / total * _estimates(kernel[np.ix_(place, place)], sides)
    chance = (1 + int((beyond >= estimate).sum())) / (1 + PERMUTATIONS)
    return Shift(distance=math.sqrt(estimate), significant=chance < SIGNIFICANCE)


Part = tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _parts(window: Words, slices: Words) -> list[Part]:
    """(slice, places in the window, places in the reference) of what is compared with what.

    One request of a slice says nothing of a spread, and is left out.
    """
    found = []
    for slice, mask in strata(window, known(slices)):
        other = np.ones(len(slices), dtype=np.bool_) if slice == REST else slices == slice
        if mask.sum() > 1:
            found.append((slice, np.flatnonzero(mask), np.flatnonzero(other)))
    return found


def _distance(reference: States, parts: list[Part], ours: Floats, theirs: Floats) -> float:
    """Unbiased MMD^2, the mean over the window's requests of that of their slice."""
    total = 0.0
    for slice, mine, other in parts:
        own, across = (np.exp(_squares(ours[mine], x) / (-2 * reference.width**2)) for x in (ours[mine], theirs[other]))
        total += len(mine) * (_alike(own) + reference.alike[slice] - 2 * float(across.mean()))
    return total / max(sum(len(mine) for _, mine, _ in parts), 1)


def _alike(kernel: Floats) -> float:
    """Mean kernel of two different rows."""
    n = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (n * (n - 1)))


def _sample(stats: RequestStats, rng: np.random.Generator) -> RequestStats:
    if len(stats) <= MAX_ROWS:
        return stats
    chosen = np.zeros(len(stats), dtype=np.bool_)
    chosen[rng.permutation(len(stats))[:MAX_ROWS]] = True
    return stats.take(chosen)


def _squares(left: Floats, right: Floats) -> Floats:
    """[n, m] squared distances."""
    norms = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None]
    return np.maximum(norms - 2 * left @ right.T, 0.0)


def _permuted(ours: int, conversations: Words, rng: np.random.Generator) -> Floats:
    """[PERMUTATIONS, n] 1 for requests on the window's side when whole conversations are exchanged.

    Conversations are laid out in a random order and cut where the window's number of requests is reached.
    """
    names, member = np.unique(conversations, return_inverse=True)
    sizes = np.bincount(member, minlength=len(names))
    order = np.argsort(rng.random((PERMUTATIONS, len(names))), axis=1)
    before = np.cumsum(sizes[order], axis=1) - sizes[order]
    taken = np.empty_like(order, dtype=np.float64)
    np.put_along_axis(taken, order, (before < ours).astype(np.float64), axis=1)
    found: Floats = taken[:, member]
    return found


def _estimates(kernel: Floats, sides: npt.NDArray[np.float64]) -> Floats:
    """[k] unbiased MMD^2 for each assignment of the n requests to two sides; 0 where a side is too small for it."""
    off = kernel - np.diag(np.diag(kernel))
    n = sides.sum(axis=1)
    m = sides.shape[1] - n
    product = sides @ off
    within = (product * sides).sum(axis=1)
    total, to_all = off.sum(), product.sum(axis=1)
    across, others = to_all - within, total - 2 * to_all + within
    usable = (n > 1) & (m > 1)
    n, m = np.where(usable, n, 2.0), np.where(usable, m, 2.0)
    return np.where(usable, within / (n * (n - 1)) + others / (m * (m - 1)) - 2 * across / (n * m), 0.0)
