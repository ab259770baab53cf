"""Does the offline score predict serving: ``python -m tests.bench.decisions.live`` prints its part of decisions.json.

Acceptance lengths of the walk against SGLang's own counters on the very same requests, by draft and workload; whether
both order the drafts alike; and the predicted against the measured speedup (``speedup.py``). Intervals are of the
resampled conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from tests.bench.decisions import corpus
from tests.bench.decisions.corpus import Scores
from tests.bench.decisions.speedup import draft_steps, pooled, speed_figures

RESAMPLES = 2000


@dataclass(frozen=True)
class Paired:
    """One draft on one workload: walk and live rows of the same requests, in one order."""

    draft: str
    workload: str
    walk: Scores
    live: Scores

    @property
    def lengths(self) -> tuple[float, float]:
        """Pooled acceptance lengths, walk and live."""
        return pooled(self.walk), pooled(self.live)


def join(walk: Mapping[str, Scores], live: Mapping[str, Scores]) -> list[Paired]:
    """Every draft and workload that has both, on the requests that have both and were measured.

    Raises:
        ValueError: a draft was walked and served at different numbers of draft steps.
    """
    found = []
    for draft in sorted(set(walk) & set(live)):
        for workload in sorted(set(live[draft].workload.tolist())):
            sides = [s.take((s.workload == workload) & (s.verify_steps > 0)) for s in (walk[draft], live[draft])]
            _, *places = np.intersect1d(sides[0].request, sides[1].request, assume_unique=True, return_indices=True)
            if not len(places[0]):
                continue
            pair = Paired(draft, workload, *(s.take(p) for s, p in zip(sides, places, strict=True)))
            if draft_steps(pair.walk) != draft_steps(pair.live):
                at = f"{draft_steps(pair.walk)} and served at {draft_steps(pair.live)}"
                raise ValueError(f"{draft} on {workload}: walked at {at} draft steps: collect them at the same")
            found.append(pair)
    return found


def errors(pairs: list[Paired], rng: np.random.Generator) -> dict[str, Any]:
    """Relative error of the walk's acceptance length, and its 95% interval over resampled conversations."""
    columns = [
        np.concatenate([getattr(getattr(p, side), name) for p in pairs])
        for side in ("walk", "live")
        for name in ("tokens", "verify_steps")
    ]
    # One conversation may serve several workloads; it is resampled as one.
    _, cluster = np.unique(np.concatenate([p.live.conversation for p in pairs]), return_inverse=True)
    sums = np.stack([np.bincount(cluster, weights=column) for column in columns], axis=1)
    total, drawn = sums.sum(0), _resampled(sums, rng)
    walk, live = total[0] / total[1], total[2] / total[3]
    relative = drawn[:, 0] / drawn[:, 1] / (drawn[:, 2] / drawn[:, 3]) - 1
    return {
        "walk": walk,
        "live": live,
        "error": abs(walk / live - 1),
        "signed": walk / live - 1,
        "interval": [float(x) for x in np.quantile(relative, (0.025, 0.975))],
        "requests": len(columns[0]),
        "conversations": len(sums),
        "same_length": float(np.mean(columns[0] == columns[2])),
        "same_steps": float(np.mean(columns[1] == columns[3])),
    }


def _resampled(sums: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """[RESAMPLES, columns] totals of as many conversations drawn with replacement."""
    clusters = len(sums)
    return np.concatenate(
        [rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=100) @ sums for _ in range(RESAMPLES // 100)]
    )


def ranking(pairs: list[Paired]) -> dict[str, Any]:
    """Share of pairs of drafts, within a workload, that walk and live order alike; each on the requests of both."""
    compared = list(_compared(pairs))
    agree = [c["agree"] for c in compared]
    clear = [c["agree"] for c in compared if not c["close"]]
    return {
        "ranking_agreement": float(np.mean(agree)) if agree else None,
        "ranking_interval": wilson(sum(agree), len(agree)),
        "ranking_pairs": len(agree),
        "ranking_agreement_clear": float(np.mean(clear)) if clear else None,
        "ranking_pairs_clear": len(clear),
        "ranking_close_or_wrong": [c for c in compared if c["close"] or not c["agree"]],
    }


def _compared(pairs: list[Paired]) -> Iterator[dict[str, Any]]:
    for a, b in combinations(pairs, 2):
        if a.workload != b.workload:
            continue
        _, i, j = np.intersect1d(a.live.request, b.live.request, assume_unique=True, return_indices=True)
        if not len(i):
            continue
        walk, live = (pooled(x.take(i)) - pooled(y.take(j)) for x, y in ((a.walk, b.walk), (a.live, b.live)))
        error = difference_error(a.live.take(i), b.live.take(j))
        yield {
            "workload": a.workload,
            "drafts": [a.draft, b.draft],
            "walk": walk,
            "live": live,
            "live_error": error,
            "close": bool(abs(live) < error),
            "agree": bool(np.sign(walk) == np.sign(live)),
        }


def difference_error(a: Scores, b: Scores) -> float:
    """Standard error of the difference of two pooled acceptance lengths on the same requests, by conversation.

    A ratio's linearisation: each request moves it by (tokens - ratio steps) over all steps.
    """
    moved = [(s.tokens - pooled(s) * s.verify_steps) / s.verify_steps.sum() for s in (a, b)]
    _, cluster = np.unique(a.conversation, return_inverse=True)
    by_conversation = np.bincount(cluster, weights=moved[0] - moved[1])
    count = len(by_conversation)
    return float(np.sqrt((by_conversation**2).sum() * count / max(count - 1, 1)))


def wilson(successes: int, trials: int) -> list[float] | None:
    """95% interval of a rate. Pairs share drafts, so that it is narrower than the truth."""
    if not trials:
        return None
    found = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return [float(found.low), float(found.high)]


def measure(seed: int = 0) -> dict[str, Any]:
    """The figures under ``offline_live``; None where the data has nothing for it."""
    rng = np.random.default_rng(seed)
    walk = corpus.load_scores("walk")
    pairs = join(walk, corpus.load_scores("live"))
    drafts = {d: errors([p for p in pairs if p.draft == d], rng) for d in sorted({p.draft for p in pairs})}
    parts = [{"draft": p.draft, "workload": p.workload} | errors([p], rng) for p in pairs]
    figures = {
        "max_error": max((d["error"] for d in drafts.values()), default=None),
        "max_error_by_workload": max((p["error"] for p in parts), default=None),
        "drafts": drafts,
        "drafts_by_workload": parts,
        "workloads": sorted({p.workload for p in pairs}),
    }
    return {"offline_live": figures | ranking(pairs) | speed_figures(walk)}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
