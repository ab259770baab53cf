"""Error rates and power of the promotion gate, through ``tide.promotion.decide``, on resampled real paired results.

Run as ``python -m tests.bench.decisions.promotion [--trials N]``; ``measure`` is what ``make bench-decisions`` calls.

- Nulls: candidate and incumbent exchanged at random for each conversation, so that the true difference is 0.
  ``sharp`` asks for a gain above 0 with all requests in one slice, where nothing but the bound stands in the way;
  ``default`` is the policy as shipped.
- Mix shift: the mix of workloads that the incumbent's training saw and the gate's are drawn apart, trial by trial
  (Dirichlet, all mixes alike). ``easier`` moves 10 points to the workload with the longest acceptance length.
- The published TIDE rule promotes when the mean of the per-request acceptance lengths of the new draft on the
  evaluation set is above the old draft's mean on the training set; best-by-simulated-length (SpecForge) compares the
  means on one set.
- Gains: on a share of the conversations the candidate has the result of a better (or worse) draft, on the rest that of
  the incumbent's sibling of another seed, so that every conversation differs as it does between two trainings; without
  a sibling the incumbent's own, which makes the gain easier to see (``seeded`` says which). The share is what makes the
  wanted pooled gain over the whole corpus.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, permutations
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.decisions.corpus import Scores, load_scores
from tests.bench.decisions.paired import Ints, Sample, Walked, draw, exchanged, joined, sample
from tests.bench.decisions.rates import rate
from tests.support.reports import paired_reports
from tide.config import PromotionPolicy
from tide.domain import Verdict
from tide.promotion import decide

WORKERS, CHUNK = 2, 50
SHARP = PromotionPolicy(min_gain=0.0, min_slice_requests=1_000_000, context_bounds=())
DEFAULT = PromotionPolicy()
FURTHER = 2000
"""Requests that the truth about a pair is measured on, where there are as many."""
SMALL = 50
"""Conversations that a workload needs to be drawn from."""

Trial = Callable[[np.random.Generator], list[bool]]
"""One trial's outcomes, a column each."""


def judge(trial: Sample, policy: PromotionPolicy) -> Verdict:
    """The real gate on a trial, first attempt."""
    return decide(*trial.reports(), policy, attempt=1, states_commit="commit", policy_digest="bench")


def promoted(trial: Sample, policy: PromotionPolicy) -> bool:
    """Whether the gate promotes."""
    return judge(trial, policy).outcome == "promote"


# --- data ---


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


# --- made gains ---


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


# --- trials ---


def null(rng: np.random.Generator, requests: int, policies: Sequence[PromotionPolicy]) -> list[bool]:
    """Gate under each policy, TIDE's rule, best by mean length: on an exact null, one mix everywhere."""
    pair = _any(different(), rng)
    new, old = (exchanged(pair, draw(pair, requests, rng), rng) for _ in range(2))
    return [*(promoted(new, policy) for policy in policies), *_others(new, old)]


def shifted(
    rng: np.random.Generator, requests: int, policies: Sequence[PromotionPolicy], *, easier: bool = False
) -> list[bool]:
    """The same with another mix at the gate than in training."""
    pair = _any(different(), rng)
    names = workloads(pair)
    if easier:
        trained = dict.fromkeys(names, 1 / len(names))
        order = sorted(names, key=lambda w: sum(pair.lengths(w)))
        gate = trained | {order[-1]: trained[order[-1]] + 0.1, order[0]: trained[order[0]] - 0.1}
    else:
        trained, gate = (dict(zip(names, rng.dirichlet(np.ones(len(names))), strict=True)) for _ in range(2))
    new, old = (exchanged(pair, draw(pair, requests, rng, mix), rng) for mix in (gate, trained))
    return [*(promoted(new, policy) for policy in policies), *_others(new, old)]


def _others(new: Sample, old: Sample) -> list[bool]:
    """What TIDE's rule and best-by-simulated-length would have promoted."""
    return [new.mean_lengths[0] > old.mean_lengths[1], new.mean_lengths[0] > new.mean_lengths[1]]


def seeds(rng: np.random.Generator, requests: int) -> list[bool]:
    """Promoted; promoted though the gain on the further requests is at most ``min_gain``."""
    pair = _any(reseeded(), rng)
    ours = int(rng.integers(2))
    order = rng.permutation(pair.conversations())
    cut = int(np.searchsorted(np.cumsum(np.diff(pair.starts)[order]), requests)) + 1
    here, further = (_fixed(pair, part, ours) for part in (order[:cut], order[cut:]))
    if not promoted(here, DEFAULT):
        return [False, False]
    tokens = further.tokens.sum()
    return [True, bool(tokens / further.ours.sum() - tokens / further.theirs.sum() <= DEFAULT.min_gain)]


def _fixed(pair: Walked, conversations: Ints, ours: int) -> Sample:
    chosen: npt.NDArray[np.intp] = np.full(len(conversations), ours)
    return sample(pair, conversations, chosen, 1 - chosen)


def one_slice(rng: np.random.Generator, gain: float, requests: int) -> list[bool]:
    """Promoted at a true gain, ``min_gain`` 0, one workload in turn."""
    names = slices_with(gain)
    found = with_gain(str(rng.choice(names)), gain, requests, rng)
    return [promoted(found, PromotionPolicy(min_gain=0.0))]


def three_slices(rng: np.random.Generator, gain: float, requests: int) -> list[bool]:
    """Promoted at a true gain in every slice, ``min_gain`` .02 and margin .05."""
    names = slices_with(gain)
    parts = [with_gain(name, gain, count, rng) for name, count in zip(names, _split(requests, len(names)), strict=True)]
    return [promoted(joined(parts), PromotionPolicy(min_gain=0.02, slice_margin=0.05))]


def one_harmed(rng: np.random.Generator, overall: float, harm: float, requests: int) -> list[bool]:
    """Not promoted; rejected: with a gain in total and a loss in one slice, each slice in turn."""
    names = tuple(slices_with(harm))
    gains = harmed_gains(names, str(rng.choice(names)), overall, harm)
    counts = _split(requests, len(names))
    parts = [with_gain(name, gain, count, rng) for (name, gain), count in zip(gains.items(), counts, strict=True)]
    outcome = judge(joined(parts), DEFAULT).outcome
    return [outcome != "promote", outcome == "reject"]


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


# --- running ---


def run(trial: Trial, trials: int, seed: int) -> npt.NDArray[np.int64]:
    """[columns] how often each outcome came true, over worker processes."""
    chunks = [(trial, min(CHUNK, trials - start), (seed, start)) for start in range(0, trials, CHUNK)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        return np.sum(list(pool.map(_chunk, chunks)), axis=0)


def _chunk(job: tuple[Trial, int, tuple[int, int]]) -> npt.NDArray[np.int64]:
    trial, count, seed = job
    rng = np.random.default_rng(seed)
    return np.array([trial(rng) for _ in range(count)], dtype=np.int64).sum(axis=0)


def _any(found: Sequence[Walked], rng: np.random.Generator) -> Walked:
    return found[int(rng.integers(len(found)))]


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def _rates(trial: Trial, names: Sequence[str], trials: int, seed: int) -> dict[str, dict[str, Any]]:
    hits = run(trial, trials, seed)
    return {name: rate(int(k), trials) for name, k in zip(names, hits, strict=True)}


def false_promotions(trials: int) -> dict[str, Any]:
    """Nulls with one mix and with another at the gate; the worst setting of the gate is its headline."""
    columns, policies = ("sharp", "default", "tide", "best_by_length"), (SHARP, DEFAULT)
    found: dict[str, Any] = {}
    kinds: dict[str, Callable[..., list[bool]]] = {"null": null, "mix_shift": shifted}
    for seed, (kind, trial) in enumerate(kinds.items()):
        by_size = {
            size: _rates(partial(trial, requests=size, policies=policies), columns, trials, 10 * seed + size)
            for size in (100, 500)
        }
        settings = {f"{c}_{size}": by_size[size][c] for size in by_size for c in columns[:2]}
        found[kind] = max(settings.values(), key=lambda r: r["rate"]) | {"settings": settings}
        found[f"tide_rule_{kind}"] = by_size[100]["tide"] | {"at_500": by_size[500]["tide"]}
        found[f"best_by_simulated_length_{kind}"] = by_size[100]["best_by_length"]
    easier = partial(shifted, requests=100, policies=(DEFAULT,), easier=True)
    found["easier_10_points"] = _rates(easier, ("default", *columns[2:]), trials, 30)
    found["seed_pairs"] = seed_pairs(trials)
    return found


def seed_pairs(trials: int) -> dict[str, Any] | None:
    """False promotions among drafts retrained with another seed; None when the corpus has no such pair."""
    if not reseeded():
        return None
    found = {size: run(partial(seeds, requests=size), trials, 40 + size) for size in (100, 500)}
    settings = {f"default_{size}": rate(int(hits[1]), trials) for size, hits in found.items()}
    return max(settings.values(), key=lambda r: r["rate"]) | {
        "settings": settings,
        "promoted": {size: int(hits[0]) for size, hits in found.items()},
        "pairs": [list(p.names) for p in reseeded()],
        "further_requests_at_least": min(len(p.tokens) for p in reseeded()) - 500,
        "asked_for": FURTHER,
    }


def power(trials: int) -> dict[str, Any]:
    """Promotions at true gains; headline .07, and curves over gains and requests with fewer trials."""
    curve = max(trials // 5, 1)

    def one(gain: float, requests: int, count: int) -> dict[str, Any]:
        return _rates(partial(one_slice, gain=gain, requests=requests), ("promoted",), count, 50)["promoted"]

    def three(gain: float, requests: int, count: int) -> dict[str, Any]:
        return _rates(partial(three_slices, gain=gain, requests=requests), ("promoted",), count, 60)["promoted"]

    points = [(g, n) for g in (0.03, 0.05, 0.07, 0.1) for n in (50, 100, 200) if slices_with(g)]
    spread = [(g, n) for g in (0.05, 0.07, 0.1) for n in (300, 500) if slices_with(g)]
    return {
        "one_slice": one(0.07, 100, trials)
        | {"slices": slices_with(0.07), "made_of": _used(0.07)}
        | {"curve": {f"gain {g}, {n} requests": one(g, n, curve) for g, n in points}},
        "three_slices": three(0.07, 500, trials)
        | {"slices": slices_with(0.07)}
        | {"curve": {f"gain {g}, {n} requests": three(g, n, curve) for g, n in spread}},
    }


def _used(gain: float) -> dict[str, dict[str, Any]]:
    """By workload: the drafts that the gain is made of, and the share of the third."""
    made = {name: making(name, gain) for name in slices_with(gain)}
    roles = ("incumbent", "candidate_else", "candidate_on_share")
    return {
        name: {**dict(zip(roles, m.walked.names, strict=True)), "share": m.share, "seeded": m.seeded}
        for name, m in made.items()
    }


def slice_block_rate(trials: int) -> dict[str, Any]:
    """How often a loss of .10 in one slice keeps a gain of .10 in total from serving, 500 requests."""
    found = _rates(partial(one_harmed, overall=0.1, harm=0.1, requests=500), ("blocked", "rejected"), trials, 70)
    names = tuple(slices_with(0.1))
    gains = {name: harmed_gains(names, name, 0.1, 0.1) for name in names}
    return found["blocked"] | {
        "rejected": found["rejected"],
        "true_gains": {f"{name} harmed": g | {"overall": total_gain(g)} for name, g in gains.items()},
    }


def seconds_for_10_000_requests_in_12_slices() -> float:
    """CPU seconds of one decision, context slices included."""
    reports = paired_reports({f"slice-{i}": 0.1 for i in range(12)}, 10_000 // 12)
    contexts = np.random.default_rng(0).integers(1, 20_000, len(reports[0].scores)).tolist()
    ours, theirs = (
        r.model_copy(
            update={
                "scores": tuple(
                    s.model_copy(update={"prompt_tokens": n}) for s, n in zip(r.scores, contexts, strict=True)
                )
            }
        )
        for r in reports
    )
    started = time.process_time()
    decide(ours, theirs, DEFAULT, attempt=1, states_commit="commit", policy_digest="bench")
    return time.process_time() - started


def measure(trials: int = 1000) -> dict[str, Any]:
    """This benchmark's part of ``decisions.json``."""
    drafts = sorted({name for pair in pairs() for name in pair.names})
    names, counts = np.unique(pairs()[0].workload, return_counts=True)
    return {
        "false_promotion": false_promotions(trials),
        "power": power(trials),
        "slice_block_rate": slice_block_rate(trials),
        "decide_cpu_s": seconds_for_10_000_requests_in_12_slices(),
        "promotion_corpus": {"drafts": drafts, "requests": dict(zip(names.tolist(), counts.tolist(), strict=True))},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    print(json.dumps(measure(parser.parse_args().trials), indent=2))
