"""Candidate against incumbent on some of the requests: the difference, its bounds, and what so few requests can show.

Owns these figures for the whole and for each slice. Knows nothing of outcomes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tide.acceptance import POWER_80, PairedDifference, paired_difference
from tide.config import PromotionPolicy
from tide.domain import SliceVerdict
from tide.promotion.slices import CONTEXT, OTHER, Paired, Rows

MORE_REQUESTS_LIMIT = 1_000_000
"""Asking for more than this means: the difference is too close to the threshold to be told from it."""


@dataclass(frozen=True)
class Comparison:
    """Figures of one slice, or of the whole."""

    verdict: SliceVerdict
    difference: PairedDifference
    conversations: int
    decides: bool
    margin: float
    """The least acceptable difference: below zero for a slice."""

    @property
    def uniform(self) -> bool:
        """Every conversation shows the same, and that is a difference: real requests never agree so."""
        return self.conversations > 1 and self.difference.error == 0 and self.verdict.difference.estimate != 0

    def more(self, threshold: float) -> int:
        """Further requests of this kind until the estimate, if true, is told from the threshold 4 times in 5."""
        distance = abs(self.difference.interval.estimate - threshold)
        effect = self.verdict.detectable_effect
        if effect is None:
            return self.verdict.requests
        if distance * math.sqrt(MORE_REQUESTS_LIMIT / self.verdict.requests) <= effect:
            return MORE_REQUESTS_LIMIT
        needed = self.verdict.requests * (effect / distance) ** 2
        return max(math.ceil(needed) - self.verdict.requests, 1)


def compare(name: str, paired: Paired, rows: Rows, policy: PromotionPolicy, alpha: float) -> Comparison:
    """Compare both drafts on some of the requests."""
    difference = paired_difference(
        paired.sums[rows],
        paired.conversations[rows],
        alpha=alpha,
        resamples=policy.resamples,
        seed=policy.seed,
        largest=paired.largest,
    )
    requests, conversations = int(rows.sum()), len(np.unique(paired.conversations[rows]))
    verdict = SliceVerdict(
        slice=name,
        requests=requests,
        candidate=difference.candidate,
        incumbent=difference.incumbent,
        difference=difference.interval,
        detectable_effect=(difference.reach + POWER_80) * difference.error if conversations > 1 else None,
    )
    enough = name not in (OTHER, CONTEXT + OTHER) or requests >= policy.min_slice_requests
    margin = policy.slice_margins.get(name, policy.slice_margin)
    return Comparison(verdict, difference, conversations, enough, -margin)


def figures(item: Comparison) -> str:
    """Both acceptance lengths and the gain with its bounds, as reasons name them."""
    d, v = item.verdict.difference, item.verdict
    name = v.slice if v.slice == "overall" else f"slice {v.slice}"
    return f"{name} {v.candidate:.3f} against {v.incumbent:.3f}, gain {d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
