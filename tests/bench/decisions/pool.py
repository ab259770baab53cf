"""A workload comes back (A-B-A-B): what the draft pool restores on it without training, through the real rules.

    python -m tests.bench.decisions.pool

On the second A the incumbent is B's draft, the pool holds A's and others. The pool chooses on selection requests, the
promotion gate judges on gate requests, and what then serves is measured on the rest of A: three sets of conversations,
none in two of them. ``recovered`` is its acceptance length over the best available one, where there was something to
restore; ``all`` counts also the returns on which the incumbent was the best draft anyway.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from tests.bench.decisions.corpus import Scores
from tests.bench.decisions.reports import (
    acceptance_length,
    conversations,
    digest_of,
    load,
    report_of,
    wilson,
)
from tide.config import Policy
from tide.models import pool
from tide.promotion import rule as promotion

TARGET_SHARE = 0.95
"""Of the best available acceptance length."""
REST = 0.4
"""Share of the conversations of A that what serves is measured on."""
CURVE = (25, 50, 100)


@dataclass(frozen=True)
class Trial:
    """One return of a workload."""

    recovered: float
    without_pool: float
    """The same had the incumbent stayed."""
    restorable: bool
    """A's draft is better than the incumbent by more than min_gain on the rest of A."""
    outcome: str
    """``kept`` when the pool proposed nothing, else the gate's verdict."""
    gate_requests: int
    selection_requests: int


def measure(trials: int = 100, seed: int = 0) -> dict[str, Any]:
    """``pool`` of decisions.json.

    Args:
        trials: for each ordered pair of workloads.
    """
    scores, trained = load()
    pairs = list(permutations(sorted(set(trained.values())), 2))
    found = {
        f"{a} after {b}": _run(scores, trained, a, b, trials, np.random.default_rng([seed, number]), Policy())
        for number, (a, b) in enumerate(pairs)
    }
    everything = [trial for some in found.values() for trial in some]
    return {
        **_summary([t for t in everything if t.restorable]),
        "all": _summary(everything),
        "by_pair": {pair: _summary(some) for pair, some in found.items()},
        "by_gate_requests": {
            str(n): _summary(_curve(scores, trained, pairs, n, max(trials // 4, 1), seed)) for n in CURVE
        },
        "training_steps": 0,
        "drafts": sorted(scores),
        "conversations": {w: conversations(next(iter(scores.values())), w) for w in sorted(set(trained.values()))},
    }


def _curve(
    scores: dict[str, Scores], trained: dict[str, str], pairs: Sequence[tuple[str, str]], n: int, trials: int, seed: int
) -> list[Trial]:
    """Fewer gate requests: the workload came back a shorter while ago. Half as many selection requests."""
    policy = Policy(gate_requests=n, selection_requests=max(n // 2, 1))
    runs = [
        _run(scores, trained, a, b, trials, np.random.default_rng([seed, n, number]), policy)
        for number, (a, b) in enumerate(pairs)
    ]
    return [trial for run in runs for trial in run if trial.restorable]


def _run(
    scores: dict[str, Scores],
    trained: dict[str, str],
    a: str,
    b: str,
    trials: int,
    rng: np.random.Generator,
    policy: Policy,
) -> list[Trial]:
    return [_trial(scores, trained, a, b, rng, policy) for _ in range(trials)]


def _trial(
    scores: dict[str, Scores], trained: dict[str, str], a: str, b: str, rng: np.random.Generator, policy: Policy
) -> Trial:
    of_a, of_b = (str(rng.choice([d for d, w in trained.items() if w == workload])) for workload in (a, b))
    others = [d for d in rng.permutation(sorted(scores)) if d not in (of_a, of_b)]
    members = [of_a, *map(str, others)][: policy.pool_drafts]
    chosen, judged, rest = _parts(scores[of_b], a, rng, policy)
    incumbent = report_of(of_b, scores[of_b], chosen, "selection")
    reports = [report_of(name, scores[name], chosen, "selection") for name in members]
    choice = pool.choose(incumbent, reports, policy.promotion.min_gain)
    serving, outcome = of_b, "kept"
    if choice.chosen is not None:
        name = next(name for name in members if digest_of(name) == choice.chosen)
        verdict = promotion.decide(
            report_of(name, scores[name], judged, "gate"),
            report_of(of_b, scores[of_b], judged, "gate"),
            policy.promotion,
            attempt=1,
            states_commit="gate",
            policy_digest=policy.digest(),
        )
        serving, outcome = (name if verdict.outcome == "promote" else of_b), verdict.outcome
    lengths = {name: acceptance_length(scores[name], rest) for name in (*members, of_b)}
    best = max(lengths.values())
    return Trial(
        recovered=lengths[serving] / best,
        without_pool=lengths[of_b] / best,
        restorable=best - lengths[of_b] > policy.promotion.min_gain,
        outcome=outcome,
        gate_requests=len(judged),
        selection_requests=len(chosen),
    )


def _parts(scores: Scores, workload: str, rng: np.random.Generator, policy: Policy) -> list[Any]:
    """Rows of the selection, the gate and the rest: whole conversations, each in one of them."""
    rows = np.flatnonzero(scores.workload == workload)
    names, member = np.unique(scores.conversation[rows], return_inverse=True)
    place = rng.permutation(len(names))[member]
    order = rows[np.argsort(place, kind="stable")]
    rest = round(REST * len(names))
    split = np.searchsorted(np.sort(place), [rest, rest + (len(names) - rest) // 3])
    held, selection, gate = order[: split[0]], order[split[0] : split[1]], order[split[1] :]
    return [selection[: policy.selection_requests], gate[: policy.gate_requests], held]


def _summary(trials: Sequence[Trial]) -> dict[str, Any]:
    if not trials:
        return {"n": 0}
    recovered = np.array([t.recovered for t in trials])
    enough = int((recovered >= TARGET_SHARE).sum())
    proposed = [t for t in trials if t.outcome != "kept"]
    refused = sum(t.outcome != "promote" for t in proposed)
    return {
        "n": len(trials),
        "recovered": float(np.median(recovered)),
        "recovered_p05": float(np.quantile(recovered, 0.05)),
        "share_at_least_95": enough / len(trials),
        "share_interval": wilson(enough, len(trials)),
        "without_pool": float(np.median([t.without_pool for t in trials])),
        "proposed": len(proposed) / len(trials),
        "gate_refused": refused / len(proposed) if proposed else 0.0,
        "gate_refused_interval": wilson(refused, len(proposed)),
        "gate_requests": float(np.median([t.gate_requests for t in trials])),
        "selection_requests": float(np.median([t.selection_requests for t in trials])),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=2))
