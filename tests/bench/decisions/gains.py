"""The drafts of the corpus in pairs, and candidates whose true gain is known, made of real results.

A gain is made by choice: on a share of the conversations the candidate has the result of a better (or worse) draft, on
the rest that of the incumbent's sibling of another seed, so that every conversation differs as it does between two
trainings; without a sibling the incumbent's own, which makes the gain easier to see. The share is what makes the wanted
pooled gain over the whole corpus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

import numpy as np

from tests.bench.decisions.corpus import Scores, load_scores
from tests.bench.decisions.paired import Sample, Walked, draw, sample

SMALL = 50
"""Conversations that a workload needs to be drawn from."""


@cache
def pairs() -> tuple[Walked, ...]:
    """Every two drafts of the corpus."""
    scores = load_scores_once()
    return tuple(Walked.of(names, scores) for names in combinations(sorted(scores), 2))


def stem(name: str) -> str | None:
    """What drafts retrained with another seed have in common; None for a draft without a seed in its name."""
    first, seeded, _ = name.partition("-seed")
    return first if seeded else None


@cache
def different() -> tuple[Walked, ...]:
    """Pairs of drafts that differ in more than the seed."""
    return tuple(p for p in pairs() if stem(p.names[0]) is None or stem(p.names[0]) != stem(p.names[1]))


@cache
def reseeded() -> tuple[Walked, ...]:
    """Pairs retrained with another seed."""
    return tuple(p for p in pairs() if stem(p.names[0]) is not None and stem(p.names[0]) == stem(p.names[1]))


def workloads(pair: Walked) -> list[str]:
    """Workloads with enough conversations to draw from."""
    return [w for w in pair.workloads if len(pair.conversations(w)) >= SMALL]


@dataclass(frozen=True)
class Making:
    """How a true gain is made on one workload."""

    walked: Walked
    """Incumbent's draft, the one the candidate has elsewhere, the one that brings the gain."""
    share: float
    """Of the conversations on which the candidate has the third draft's result."""

    @property
    def seeded(self) -> bool:
        """Whether candidate and incumbent differ everywhere, as drafts of two seeds do."""
        return self.walked.names[0] != self.walked.names[1]


@cache
def making(workload: str, gain: float) -> Making:
    """The drafts that make a gain on a workload: with a sibling of another seed if there is one, smallest gap first.

    Raises:
        ValueError: no drafts differ by so much there.
    """
    lengths, options = lengths_on(workload), []
    for incumbent, other in permutations(lengths, 2):
        siblings = [n for n in lengths if n not in (incumbent, other) and stem(n) and stem(n) == stem(incumbent)]
        for base in [*siblings, incumbent]:
            ends = sorted((lengths[base] - lengths[incumbent], lengths[other] - lengths[incumbent]))
            if ends[0] <= gain <= ends[1]:
                options.append((base == incumbent, ends[1] - ends[0], (incumbent, base, other)))
    if not options:
        raise ValueError(f"no two drafts differ by {gain} on {workload}: {lengths}")
    walked = Walked.of(min(options)[2], load_scores_once())
    return Making(walked, share_for(walked, workload, gain))


@cache
def load_scores_once() -> dict[str, Scores]:
    """The corpus, read once."""
    return load_scores()


@cache
def lengths_on(workload: str) -> dict[str, float]:
    """Pooled acceptance length by draft, of the drafts walked over enough of a workload."""
    found = {}
    for name, scores in load_scores_once().items():
        rows = scores.workload == workload
        if len(np.unique(scores.conversation[rows])) >= SMALL:
            found[name] = float(scores.tokens[rows].sum() / scores.verify_steps[rows].sum())
    return found


def share_for(walked: Walked, workload: str, gain: float) -> float:
    """Share of the third draft that makes a pooled gain over the incumbent, by bisection; 0 or 1 beyond the ends."""
    rows = walked.workload == workload
    tokens, steps = float(walked.tokens[rows].sum()), walked.steps[rows].sum(axis=0).astype(np.float64)
    rising = steps[2] < steps[1]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        made = tokens / (middle * steps[2] + (1 - middle) * steps[1]) - tokens / steps[0]
        low, high = (low, middle) if (made > gain) == rising else (middle, high)
    return (low + high) / 2


def with_gain(workload: str, gain: float, requests: int, rng: np.random.Generator) -> Sample:
    """Requests of one workload on which the candidate's true gain is the given one."""
    made = making(workload, gain)
    conversations = draw(made.walked, requests, rng, {workload: 1.0})
    taken = np.where(rng.random(len(conversations)) < made.share, 2, 1)
    return sample(made.walked, conversations, taken, np.zeros(len(taken), dtype=np.intp))


@cache
def slices_with(gain: float) -> list[str]:
    """Workloads on which two drafts differ by so much, three at most."""
    names = sorted({w for pair in pairs() for w in workloads(pair)})
    return [name for name in names if widest_gap(name) >= abs(gain)][:3]


@cache
def widest_gap(workload: str) -> float:
    """Largest difference in acceptance length between two drafts on a workload."""
    lengths = lengths_on(workload).values()
    return max(lengths) - min(lengths)


@cache
def harmed_gains(names: tuple[str, ...], harmed: str, overall: float, harm: float) -> dict[str, float]:
    """Gains by slice that make the total, or come as near as the drafts allow: ``harm`` in one, equal in the others."""
    low, high = 0.0, 0.999 * min(widest_gap(name) for name in names if name != harmed)
    for _ in range(30):
        middle = (low + high) / 2
        gains = {name: -abs(harm) if name == harmed else middle for name in names}
        low, high = (low, middle) if total_gain(gains) > overall else (middle, high)
    return {name: -abs(harm) if name == harmed else low for name in names}


def total_gain(gains: Mapping[str, float]) -> float:
    """Pooled gain of equal shares of requests with a gain each."""
    tokens, ours, theirs = 0.0, 0.0, 0.0
    for name, gain in gains.items():
        walked = making(name, gain).walked
        mean, base = float(walked.tokens[walked.workload == name].mean()), float(walked.lengths(name)[0])
        tokens, ours, theirs = tokens + mean, ours + mean / (base + gain), theirs + mean / base
    return tokens / ours - tokens / theirs
