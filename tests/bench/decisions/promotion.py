"""Error rates and power of the promotion gate, through ``tide.promotion.rule.decide``, on resampled real pairs.

Run as ``python -m tests.bench.decisions.promotion [--trials N]``; ``measure`` is what ``make bench-decisions`` calls.
What a trial is stands in ``promotion_trials``, how true gains are made in ``gains``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.decisions.gains import harmed_gains, making, pairs, reseeded, slices_with, total_gain
from tests.bench.decisions.promotion_trials import (
    DEFAULT,
    SHARP,
    Trial,
    null,
    one_harmed,
    one_slice,
    seeds,
    shifted,
    three_slices,
)
from tests.bench.decisions.rates import rate
from tests.support.reports import paired_reports
from tide.promotion.rule import decide

WORKERS, CHUNK = 2, 50
FURTHER = 2000
"""Requests that the truth about a pair is measured on, where there are as many."""


def run(trial: Trial, trials: int, seed: int) -> npt.NDArray[np.int64]:
    """[columns] how often each outcome came true, over worker processes."""
    chunks = [(trial, min(CHUNK, trials - start), (seed, start)) for start in range(0, trials, CHUNK)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        return np.sum(list(pool.map(_chunk, chunks)), axis=0)


def _chunk(job: tuple[Trial, int, tuple[int, int]]) -> npt.NDArray[np.int64]:
    trial, count, seed = job
    rng = np.random.default_rng(seed)
    return np.array([trial(rng) for _ in range(count)], dtype=np.int64).sum(axis=0)


def _rates(trial: Trial, names: Sequence[str], trials: int, seed: int) -> dict[str, dict[str, Any]]:
    hits = run(trial, trials, seed)
    return {name: rate(int(k), trials) for name, k in zip(names, hits, strict=True)}


def _fewer(trials: int) -> int:
    """Rates near 0 or 1 need fewer trials than the nulls: their intervals are narrow."""
    return max(trials // 4, 1)


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
    found["easier_10_points"] = _rates(easier, ("default", *columns[2:]), _fewer(trials), 30)
    found["seed_pairs"] = seed_pairs(_fewer(trials))
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
        "power": power(_fewer(trials)),
        "slice_block_rate": slice_block_rate(_fewer(trials)),
        "decide_cpu_s": seconds_for_10_000_requests_in_12_slices(),
        "promotion_corpus": {"drafts": drafts, "requests": dict(zip(names.tolist(), counts.tolist(), strict=True))},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    print(json.dumps(measure(parser.parse_args().trials), indent=2))
