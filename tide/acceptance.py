"""Acceptance as TIDE counts it: the verify-step walk, the pooled ratio, and the interval of a paired difference.

Owns the arithmetic of ``ACCEPTANCE_DEFINITION`` and its statistics. Knows nothing of drafts, thresholds or decisions:
arrays in, figures out; the seed is an argument.

The counting is SGLang's (``spec_accept_length = completion_tokens / spec_verify_ct``): every generated token counts,
the first one, which prefill makes, included; so plain decoding of G tokens takes G - 1 steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tide.domain import EvalReport, Interval

Floats = npt.NDArray[np.float64]

MAX_CLUSTERS = 500
"""More conversations than this are first summed into as many groups: their figures stay independent, the interval
widens by less than 1%, and time and memory are bounded."""
NO_DRAFT = "none"
"""What a report of plain decoding names as its draft."""
TAIL_RESAMPLES = 10
"""Resamples that must lie beyond a bound, so that a small alpha is not read off the one extreme resample."""
POWER_80 = 0.8416
"""Normal quantile of a power of 0.8."""
_BLOCK = 1000
"""Resamples drawn and computed at once."""
_ROUNDING = 1e-9
_CANCELLED = 1e-13


@dataclass(frozen=True)
class Walk:
    """What serving one request with a draft would have counted."""

    tokens: int
    verify_steps: float
    accepted_at: tuple[float, ...]
    """Verify steps that accepted at least d + 1 proposals, by depth d."""

    @property
    def accepted(self) -> float:
        """Accepted proposals."""
        return sum(self.accepted_at)


class Replay:
    """The verify steps of one logged request: propose, accept the right prefix, take the bonus token, jump.

    Args:
        tokens: generated tokens; the first comes from prefill.
        depth: proposals that one verify step can accept.
    """

    def __init__(self, tokens: int, depth: int) -> None:
        self.position, self._tokens, self._steps = 0, tokens, 0
        self._right, self._expected = [0] * depth, [0.0] * depth

    @property
    def left(self) -> int:
        """Known tokens behind the newest one, generated token ``position``; none: the walk has ended."""
        return max(self._tokens - 1 - self.position, 0)

    def step(self, right: int, expected: Sequence[float] = ()) -> None:
        """One verify step.

        Args:
            right: leading proposals that equal the logged tokens, at most ``left``.
            expected: chance of acceptance by depth, given the logged tokens before it: 0 behind the first wrong one.
        """
        self._steps += 1
        self.position += right + 1
        for depth in range(right):
            self._right[depth] += 1
        for depth, share in enumerate(expected):
            self._expected[depth] += share

    def counted(self) -> Walk:
        """As greedy verification counts it."""
        return Walk(self._tokens, self._steps, tuple(self._right))

    def expected(self) -> Walk:
        """As verification that samples counts it, in expectation.

        ``step`` was given the chance that verification accepts a proposal where counting gives 1 or 0 by the token that
        happened to be sampled: the same mean with less variance (Rao-Blackwell). The expected steps take that mean for
        a step of THIS answer: as many tokens, emitted at 1 + mean acceptance a step. With chances of 1 and 0 alone they
        are the counted ones.
        """
        if not self._steps:
            return Walk(self._tokens, 0, tuple(self._expected))
        emitted, mean = self._steps + sum(self._right), sum(self._expected) / self._steps
        steps = emitted / (1 + mean)
        return Walk(self._tokens, steps, tuple(share * steps / self._steps for share in self._expected))


def expected_length(rate: float, steps: int) -> float:
    """Acceptance length that a per-token rate predicts for ANOTHER number of draft steps: (1-a^(g+1))/(1-a)."""
    return float(steps + 1) if rate >= 1 else (1 - rate ** (steps + 1)) / (1 - rate)


def baseline_without_draft(report: EvalReport) -> EvalReport:
    """The same requests as plain decoding would have served them: one token a step after prefill's.

    This is what a first draft is compared with; its draft is ``none`` and it has no contract.
    """
    nothing = {"proposed": 0, "accepted": 0, "accepted_at": ()}
    scores = tuple(
        score.model_copy(update={"verify_steps": max(score.tokens - 1, 0), **nothing}) for score in report.scores
    )
    return report.model_copy(update={"draft": NO_DRAFT, "contract": None, "scores": scores})


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two pooled acceptance lengths on the same requests, candidate minus incumbent."""

    candidate: float
    incumbent: float
    interval: Interval
    error: float
    """Standard error of the estimate."""
    reach: float
    """Distance from the estimate to its lower bound, in standard errors."""


def paired_difference(
    sums: Floats, conversations: npt.NDArray[np.str_], *, alpha: float, resamples: int, seed: int, largest: float
) -> PairedDifference:
    """Compare two drafts by a studentised bootstrap that resamples whole conversations.

    Conversations get independent Poisson(1) weights (the Poisson bootstrap of Hanley and MacGibbon, 2006; Chamandy et
    al., 2012). The same weights serve every call of one seed, so that exchanging the drafts negates the interval and
    the order of requests is of no consequence.

    Args:
        sums: [n, 4] a request: candidate tokens, candidate verify steps, incumbent tokens, incumbent verify steps.
        conversations: [n] which requests stand or fall together.
        alpha: error rate of each one-sided bound.
        resamples: at least this many; more when alpha is so small that the tail would be empty.
        largest: the difference cannot exceed this in size; bounds are cut there, which also keeps them finite.
    """
    clusters = _cluster(sums, conversations, np.random.default_rng(seed))
    means, count = _moments(clusters).mean(axis=0)[None], np.array([float(len(clusters))])
    difference, error = (float(x[0]) for x in _differences(means, count))
    candidate, incumbent = clusters[:, 0].sum() / clusters[:, 1].sum(), clusters[:, 2].sum() / clusters[:, 3].sum()
    if len(clusters) < 2 or error == 0.0:
        spread = 0.0 if len(clusters) > 1 else 2 * largest  # one conversation says nothing of another
        interval = _interval(difference, difference - spread, difference + spread, largest)
        return PairedDifference(float(candidate), float(incumbent), interval, 0.0, 0.0)
    studentised = _resample(clusters, difference, max(resamples, math.ceil(TAIL_RESAMPLES / alpha)), seed)
    last = len(studentised) - 1
    rank = min(math.ceil((1 - alpha) * (last + 2)) - 1, last)
    reach_down, reach_up = float(studentised[rank]), -float(studentised[last - rank])
    interval = _interval(difference, difference - reach_down * error, difference + reach_up * error, largest)
    return PairedDifference(float(candidate), float(incumbent), interval, error, (difference - interval.low) / error)


def _interval(estimate: float, low: float, high: float, largest: float) -> Interval:
    return Interval(estimate=estimate, low=max(low, -largest), high=min(high, largest))


def _cluster(sums: Floats, conversations: npt.NDArray[np.str_], rng: np.random.Generator) -> Floats:
    """[clusters, 4] sums of independent groups of conversations."""
    names, member = np.unique(conversations, return_inverse=True)
    if len(names) > MAX_CLUSTERS:
        member = (rng.permutation(len(names)) % MAX_CLUSTERS)[member]
    groups = min(len(names), MAX_CLUSTERS)
    return np.stack([np.bincount(member, sums[:, column], groups) for column in range(4)], axis=1)


_UPPER = np.triu_indices(4)


def _moments(clusters: Floats) -> Floats:
    """[clusters, 14] the four sums and their ten products: all that estimate and error depend on, linearly."""
    return np.concatenate([clusters, clusters[:, _UPPER[0]] * clusters[:, _UPPER[1]]], axis=1)


def _differences(means: Floats, clusters: Floats) -> tuple[Floats, Floats]:
    """Estimates and linearised standard errors from [B, 14] mean moments of so many clusters each, [B]."""
    tokens_c, steps_c, tokens_i, steps_i = means[:, :4].T
    ratio_c, ratio_i = tokens_c / steps_c, tokens_i / steps_i
    gradient = np.stack([1 / steps_c, -ratio_c / steps_c, -1 / steps_i, ratio_i / steps_i], axis=1)
    products = gradient[:, _UPPER[0]] * gradient[:, _UPPER[1]] * np.where(_UPPER[0] == _UPPER[1], 1.0, 2.0)
    variance = (products * means[:, 4:]).sum(axis=1) / np.maximum(clusters - 1, 1)
    # The terms cancel exactly when both drafts did the same; what is left then is rounding, not spread.
    scale = (np.abs(products) * means[:, 4:]).sum(axis=1)
    error = np.sqrt(np.where(variance > _CANCELLED * scale, variance, 0.0))
    return ratio_c - ratio_i, error


def _resample(clusters: Floats, difference: float, count: int, seed: int) -> Floats:
    """[count] sorted (estimate* - estimate) / error* of resampled clusters."""
    groups, parts = len(clusters), []
    moments = np.concatenate([np.ones((groups, 1)), _moments(clusters)], axis=1)  # the first adds up the weights
    for block in range(math.ceil(count / _BLOCK)):
        weights = _weights(seed, block, 1 << (groups - 1).bit_length())[: count - block * _BLOCK, :groups]
        sums = weights @ moments
        sums = sums[sums[:, 0] > 0]  # of two conversations one resample in seven is empty
        estimates, errors = _differences(sums[:, 1:] / sums[:, :1], sums[:, 0])
        offsets = estimates - difference
        offsets[np.abs(offsets) < _ROUNDING] = 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            parts.append(np.where(offsets == 0.0, 0.0, offsets / errors))
    return np.sort(np.concatenate(parts))


@lru_cache(maxsize=16)
def _weights(seed: int, block: int, width: int) -> Floats:
    """[_BLOCK, width] independent Poisson(1) counts, 4 MB at most; fewer clusters take the first columns."""
    drawn = np.random.default_rng((seed, block)).integers(0, _LEVELS, (_BLOCK, width), dtype=np.uint16)
    weights = _POISSON[drawn]
    weights.flags.writeable = False
    return weights


_LEVELS = 1 << 16
_CUMULATED = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(12)])
_POISSON = np.searchsorted(_CUMULATED, (np.arange(_LEVELS) + 0.5) / _LEVELS).astype(np.float64)
"""Poisson(1) counts by equally likely levels: drawing one is looking it up."""
