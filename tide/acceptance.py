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

import numpy as np
import numpy.typing as npt

from tide.domain import EvalReport, Interval

Floats = npt.NDArray[np.float64]

MAX_CLUSTERS = 500
"""More conversations than this are first summed into as many groups: their figures stay independent, the interval
widens by less than 1%, and time and memory are bounded."""
TAIL_RESAMPLES = 10
"""Resamples that must lie beyond a bound, so that a small alpha is not read off the one extreme resample."""
POWER_80 = 0.8416
"""Normal quantile of a power of 0.8."""
_ENTRIES = 2_000_000
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
    return report.model_copy(update={"draft": "none", "contract": None, "scores": scores})


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

    Args:
        sums: [n, 4] a request: candidate tokens, candidate verify steps, incumbent tokens, incumbent verify steps.
        conversations: [n] which requests stand or fall together.
        alpha: error rate of each one-sided bound.
        resamples: at least this many; more when alpha is so small that the tail would be empty.
        largest: the difference cannot exceed this in size; bounds are cut there, which also keeps them finite.
    """
    rng = np.random.default_rng(seed)
    clusters = _cluster(sums, conversations, rng)
    difference, error = (float(x[0]) for x in _differences(_moments(clusters).mean(axis=0)[None], len(clusters)))
    candidate, incumbent = clusters[:, 0].sum() / clusters[:, 1].sum(), clusters[:, 2].sum() / clusters[:, 3].sum()
    if len(clusters) < 2 or error == 0.0:
        spread = 0.0 if len(clusters) > 1 else 2 * largest  # one conversation says nothing of another
        interval = _interval(difference, difference - spread, difference + spread, largest)
        return PairedDifference(float(candidate), float(incumbent), interval, 0.0, 0.0)
    count = max(resamples, math.ceil(TAIL_RESAMPLES / alpha))
    studentised = _resample(clusters, difference, count, rng)
    rank = min(math.ceil((1 - alpha) * (count + 1)), count) - 1
    reach_down, reach_up = float(studentised[rank]), -float(studentised[count - 1 - rank])
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


def _differences(means: Floats, clusters: int) -> tuple[Floats, Floats]:
    """Estimates and linearised standard errors from [B, 14] mean moments."""
    tokens_c, steps_c, tokens_i, steps_i = means[:, :4].T
    ratio_c, ratio_i = tokens_c / steps_c, tokens_i / steps_i
    gradient = np.stack([1 / steps_c, -ratio_c / steps_c, -1 / steps_i, ratio_i / steps_i], axis=1)
    products = gradient[:, _UPPER[0]] * gradient[:, _UPPER[1]] * np.where(_UPPER[0] == _UPPER[1], 1.0, 2.0)
    variance = (products * means[:, 4:]).sum(axis=1) / max(clusters - 1, 1)
    # The terms cancel exactly when both drafts did the same; what is left then is rounding, not spread.
    scale = (np.abs(products) * means[:, 4:]).sum(axis=1)
    error = np.sqrt(np.where(variance > _CANCELLED * scale, variance, 0.0))
    return ratio_c - ratio_i, error


def _resample(clusters: Floats, difference: float, count: int, rng: np.random.Generator) -> Floats:
    """[count] sorted (estimate* - estimate) / error* of resampled clusters."""
    groups, moments = len(clusters), _moments(clusters)
    block, parts = max(1, _ENTRIES // groups), []
    for start in range(0, count, block):
        rows = min(block, count - start)
        drawn = rng.integers(0, groups, size=(rows, groups)) + np.arange(rows)[:, None] * groups
        weights = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups)
        estimates, errors = _differences(weights.astype(np.float64) @ moments / groups, groups)
        offsets = estimates - difference
        offsets[np.abs(offsets) < _ROUNDING] = 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            parts.append(np.where(offsets == 0.0, 0.0, offsets / errors))
    return np.sort(np.concatenate(parts))
