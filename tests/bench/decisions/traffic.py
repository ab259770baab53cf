"""Streams of traffic for the drift benchmark: whole conversations of the corpus, drawn again, under a daily cycle.

Owns how a stream is drawn and how a loss is put into it. The counters are one draft's real ones; what the request
table says of the inputs goes with them.

The mix of workloads turns once a day (``DAY`` requests): each workload's share swings by ``SWING`` of its mean. A loss
is binomial thinning: every accepted token of every request is kept with one probability, so that the pooled rate falls
by the loss and a request's own spread stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tests.bench.decisions.corpus import Scores, load_requests, load_scores
from tide.states.request_stats import RequestStats

DAY = 1000
"""Requests of one turn of the mix."""
SWING = 0.6
MIN_WORKLOAD = 50
"""Workloads with fewer requests in the corpus are left out: the same few would come again and again."""

DRAFT = "d" * 64


@dataclass(frozen=True)
class Pool:
    """One draft's requests of all workloads, as the drift gate sees them; ``conversation`` is the corpus's own."""

    stats: RequestStats
    members: tuple[tuple[npt.NDArray[np.int64], ...], ...]
    """Places of the requests of each conversation, by workload."""

    @property
    def rate(self) -> float:
        """Pooled acceptance rate when workloads come in equal parts."""
        rates = []
        for conversations in self.members:
            rows = np.concatenate(conversations)
            rates.append(self.stats.accepted[rows].sum() / self.stats.proposed[rows].sum())
        return float(np.mean(rates))


def pools(source: str = "walk") -> dict[str, Pool]:
    """A pool for every draft of the corpus."""
    return {name: _pool(scores) for name, scores in load_scores(source).items()}


def stream(
    pool: Pool, count: int, rng: np.random.Generator, *, start: float = 0.0, phase: float = 0.0, mix_move: float = 0.0
) -> RequestStats:
    """Requests one second apart.

    Args:
        start: time of the first one; the daily cycle goes on from there.
        phase: of the cycle, 0..1.
        mix_move: share of the traffic that goes from one workload, drawn at random, to another for the whole stream.
    """
    when = start + np.arange(count)
    shares = _shares(len(pool.members), when / DAY + phase)
    if mix_move:
        giver, taker = rng.permutation(len(pool.members))[:2]
        moved = np.minimum(mix_move, shares[:, giver])
        shares[:, giver], shares[:, taker] = shares[:, giver] - moved, shares[:, taker] + moved
    chosen = (rng.random(count)[:, None] > np.cumsum(shares, axis=1)[:, :-1]).sum(axis=1)
    picks = [pool.members[w][rng.integers(len(pool.members[w]))] for w in chosen]
    rows = np.concatenate(picks)[:count]
    names = np.repeat(np.arange(len(picks)), [len(p) for p in picks])[:count]
    label = f"{int(start)}-"
    stats = pool.stats.take(rows)  # type: ignore[arg-type]
    return replace(
        stats,
        finished_at=when + 1.0,
        request=np.char.add(label, np.arange(count).astype(np.str_)),
        conversation=np.char.add(label, names.astype(np.str_)),
    )


def with_loss(stats: RequestStats, share: npt.NDArray[np.float64] | float, rng: np.random.Generator) -> RequestStats:
    """The stream with this share of accepted tokens lost, one share or one a request."""
    kept = rng.binomial(stats.accepted.astype(np.int64), 1 - np.clip(share, 0, 1))
    return replace(stats, accepted=kept.astype(np.float64))


def _shares(workloads: int, turns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[n, workloads] shares of the mix; they swing against one another and always add up to 1."""
    angle = 2 * np.pi * (turns[:, None] + np.arange(workloads) / workloads)
    found: npt.NDArray[np.float64] = (1 + (SWING * np.sin(angle) if workloads > 1 else 0 * angle)) / workloads
    return found


def _pool(scores: Scores) -> Pool:
    table = load_requests()
    place = {name: i for i, name in enumerate(table["request"].to_pylist())}
    names, counts = np.unique(scores.workload, return_counts=True)
    wanted = names[counts >= MIN_WORKLOAD]
    usable = np.isin(scores.workload, wanted) & (scores.proposed > 0) & np.isin(scores.request, list(place))
    scores = scores.take(usable)
    inputs = table.take([place[str(name)] for name in scores.request])
    count = len(scores)
    stats = RequestStats(
        finished_at=np.arange(count, dtype=np.float64),
        request=scores.request,
        conversation=scores.conversation,
        draft=np.full(count, DRAFT),
        regime=np.char.add(scores.slice, "|greedy"),
        script=np.array([s or "unknown" for s in inputs["script"].to_pylist()], dtype=np.str_),
        prompt_tokens=scores.prompt_tokens.astype(np.float64),
        cached_tokens=np.zeros(count),
        response_tokens=scores.tokens.astype(np.float64),
        verify_steps=scores.verify_steps.astype(np.float64),
        proposed=scores.proposed.astype(np.float64),
        accepted=scores.accepted.astype(np.float64),
        sketch=np.array(inputs["token_sketch"].to_pylist(), dtype=np.uint16),
        pooled=np.array(inputs["pooled"].to_pylist(), dtype=np.float32),
    )
    members = []
    for workload in wanted:
        rows = np.flatnonzero(scores.workload == workload)
        conversations = scores.conversation[rows]
        members.append(tuple(rows[conversations == name] for name in np.unique(conversations)))
    return Pool(stats, tuple(members))
