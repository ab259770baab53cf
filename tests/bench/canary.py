"""How often the canary is wrong, and how soon it is right: ``python -m tests.bench.canary`` writes ``operate.json``.

Promotions are simulated through the real rule (``tide.canary.rule``, asked after every request) on per-request data
of real SGLang runs: what a draft accepted live, and its walk over the same requests. A/A: the candidate is the
incumbent, so that every rollback is false. Bad: the same requests with accepted tokens lost at random, so that its
acceptance rate is .15 lower; its own walk is lower by as much. Two real pairs beside them: sibling drafts, and a draft
against one trained on the workload.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench import operate_results
from tests.bench.decisions import corpus
from tests.bench.decisions.corpus import Scores
from tide.canary.rule import Compared, decide
from tide.domain import CanaryReport
from tide.policies import CanaryPolicy

TRIALS, LOST = 200, 0.15
POLICY = CanaryPolicy()

Floats = npt.NDArray[np.float64]
Trial = Callable[[np.random.Generator], list[Compared]]


@dataclass(frozen=True)
class Requests:
    """One draft on one workload: counts live and walked, in one order."""

    draft: str
    workload: str
    live: Scores
    walk: Scores

    @property
    def rates(self) -> tuple[Floats, Floats]:
        """Acceptance rates, live and walked."""
        return self.live.accepted / self.live.proposed, self.walk.accepted / self.walk.proposed


def measure(trials: int = TRIALS) -> dict[str, Any]:
    """All figures of the canary."""
    rng, sets = np.random.default_rng(0), list(served())
    by_name = {(s.draft, s.workload): s for s in sets}
    able = [s for s in sets if s.rates[0].mean() > LOST]
    equal = run(rng, trials, lambda g: same(sets[g.integers(len(sets))], g))
    bad = run(rng, trials, lambda g: worse(able[g.integers(len(able))], g, LOST))
    half = run(rng, trials, lambda g: worse(able[g.integers(len(able))], g, LOST / 2))
    pairs = {
        "siblings": (by_name.get(("chat-seed2", "chat")), by_name.get(("chat-seed1", "chat"))),
        "not_of_this_workload": (by_name.get(("chat", "functions")), by_name.get(("functions-seed1", "functions"))),
    }
    real = {name: run(rng, trials, versus(*pair)) | loss(*pair) for name, pair in pairs.items() if all(pair)}
    return {
        "false_rollback_rate": equal["rolled_back"],
        "canary": {
            "promotions": trials,
            "policy": POLICY.model_dump(mode="json"),
            "a_a": equal,
            f"acceptance_rate_minus_{LOST:g}": bad,
            f"acceptance_rate_minus_{LOST / 2:g}": half,
            **real,
        },
    }


def served() -> Iterator[Requests]:
    """Every draft and workload of the corpus that was walked and served."""
    live, walk = corpus.load_scores("live"), corpus.load_scores("walk")
    for draft in sorted(set(live) & set(walk)):
        for workload in sorted(set(live[draft].workload.tolist())):
            sides = [s.take((s.workload == workload) & (s.proposed > 0)) for s in (live[draft], walk[draft])]
            _, *places = np.intersect1d(sides[0].request, sides[1].request, assume_unique=True, return_indices=True)
            if len(places[0]) >= 30:
                yield Requests(draft, workload, *(s.take(p) for s, p in zip(sides, places, strict=True)))


def same(requests: Requests, rng: np.random.Generator) -> list[Compared]:
    """The candidate is the incumbent."""
    live, walk = requests.rates
    chosen = rng.integers(len(live), size=POLICY.max_requests)
    return [Compared(live[i], walk[i], walk[i]) for i in chosen]


def worse(requests: Requests, rng: np.random.Generator, lost: float) -> list[Compared]:
    """The incumbent with accepted tokens lost at random, so that its mean rate is lower by ``lost``."""
    live, walk = requests.rates
    chosen = rng.integers(len(live), size=POLICY.max_requests)
    kept = 1 - lost / live.mean()
    found = []
    for i in chosen:
        rate = rng.binomial(requests.live.accepted[i], kept) / requests.live.proposed[i]
        found.append(Compared(rate, min(max(rate + walk[i] - live[i], 0.0), 1.0), walk[i]))
    return found


def versus(candidate: Requests | None, incumbent: Requests | None) -> Trial:
    """Two real drafts on the requests that both were walked on."""
    assert candidate is not None
    assert incumbent is not None
    ours, theirs = common(candidate, incumbent)

    def trial(rng: np.random.Generator) -> list[Compared]:
        live, walk = candidate.rates
        chosen = rng.integers(len(ours), size=POLICY.max_requests)
        return [Compared(live[ours[i]], walk[ours[i]], incumbent.rates[1][theirs[i]]) for i in chosen]

    return trial


def common(candidate: Requests, incumbent: Requests) -> tuple[Any, Any]:
    """Places of the requests of both."""
    _, ours, theirs = np.intersect1d(
        candidate.live.request, incumbent.walk.request, assume_unique=True, return_indices=True
    )
    return ours, theirs


def loss(candidate: Requests | None, incumbent: Requests | None) -> dict[str, float]:
    """What the candidate really loses, in acceptance rate."""
    assert candidate is not None
    assert incumbent is not None
    ours, theirs = common(candidate, incumbent)
    return {"loss": round(float(np.mean(incumbent.rates[1][theirs] - candidate.rates[0][ours])), 4)}


def run(rng: np.random.Generator, trials: int, trial: Trial) -> dict[str, Any]:
    """Share rolled back, and after how many requests."""
    ends = [promote(trial(rng)) for _ in range(trials)]
    after = sorted(requests for requests, report in ends if not report.good)
    outcomes = [report.outcome for _, report in ends]
    figures: dict[str, Any] = {"rolled_back": len(after) / trials, "engine": outcomes.count("engine") / trials}
    if after:
        middle, late = np.quantile(after, [0.5, 0.95])
        figures |= {"requests_median": float(middle), "requests_95": float(late), "requests_most": after[-1]}
    return figures


def promote(compared: list[Compared]) -> tuple[int, CanaryReport]:
    """One promotion, looked at after every request: how many it took, and what was decided."""
    for seen in range(1, len(compared) + 1):
        report = decide(compared[:seen], [c.live for c in compared[:seen]], POLICY, elapsed_s=0.0)
        if report is not None:
            return seen, report
    raise AssertionError("max_requests ends every promotion")


def main() -> None:
    """Measure, write, print."""
    began = time.monotonic()
    figures = measure()
    figures["canary"]["seconds"] = round(time.monotonic() - began, 1)
    operate_results.merge(figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
