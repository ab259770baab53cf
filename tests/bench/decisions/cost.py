"""Whether training only when it pays keeps the speed of training always: a replay of 20 phases, in simulated time.

    python -m tests.bench.decisions.cost

Per-request acceptance is the corpus'. A training takes its time on another device and yields the corpus' draft of the
workload that is served when it begins; more tokens of one workload make no better draft here, so what an
always-training service gains by them is not seen. Ours decides by the real rules: drift, pool, cost and promotion.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.bench.decisions import corpus
from tests.bench.decisions.adapting import COUNTS, cost_policy, ours
from tests.bench.decisions.replay import Service, Setting, draw, unlabelled
from tests.bench.decisions.reports import load
from tide.domain import EngineProfile, ProfilePoint

STATED_PROFILE = EngineProfile(
    engine="stated, not measured",
    points=(
        ProfilePoint(concurrency=1, plain_step_s=0.0200, verify_step_s=0.0225, draft_step_s=0.0012),
        ProfilePoint(concurrency=8, plain_step_s=0.0220, verify_step_s=0.0280, draft_step_s=0.0014),
        ProfilePoint(concurrency=32, plain_step_s=0.0260, verify_step_s=0.0440, draft_step_s=0.0020),
    ),
)
"""Of the size that an 8B model has on one GPU; the corpus' own profile takes its place when it was measured."""
EMA_SHORT, EMA_LONG, EMA_DROP = 0.95, 0.995, 0.08
"""The published rule (arXiv 2602.05145): train when the short average of the acceptance rate falls so far under the
long one; deploy when the new draft's mean on evaluation requests is above the old one's on training requests."""
MIXED = 0.85
"""Share of a phase's own workload at which enough requests of others are left for the gate to protect their slices."""
Run = Callable[[Service], dict[str, Any]]


def measure(seeds: int = 6, first_seed: int = 0) -> dict[str, Any]:
    """``cost`` of decisions.json: means over seeds, with their spread; and once more with phases less pure."""
    setting = _setting()
    mixed = _measure(replace(setting, mix=MIXED), max(seeds // 3, 1), first_seed)
    kept = ("throughput_ratio", "throughput_ratio_spread", "training_ratio", "training_ratio_spread", "ours", "seeds")
    return {**_measure(setting, seeds, first_seed), f"mix_{MIXED}": {key: mixed[key] for key in kept}}


def _measure(setting: Setting, seeds: int, first_seed: int) -> dict[str, Any]:
    runs = [_replay(setting, np.random.default_rng([first_seed, n])) for n in range(seeds)]
    ratios = {name: [run[name]["throughput"] / run["always"]["throughput"] for run in runs] for name in POLICIES}
    trainings = {name: [run[name]["trainings"] for run in runs] for name in POLICIES}
    ours = [a / b for a, b in zip(trainings["ours"], trainings["always"], strict=True)]
    return {
        "throughput_ratio": statistics.fmean(ratios["ours"]),
        "throughput_ratio_spread": _spread(ratios["ours"]),
        "training_ratio": sum(trainings["ours"]) / sum(trainings["always"]),
        "training_ratio_spread": _spread(ours),
        "policies": {
            name: {
                "throughput_ratio": statistics.fmean(ratios[name]),
                "throughput_ratio_spread": _spread(ratios[name]),
                "trainings": statistics.fmean(trainings[name]),
                "trainings_a_phase": statistics.fmean(trainings[name]) / setting.phases,
            }
            for name in POLICIES
        },
        "ours": {key: statistics.fmean(run["ours"][key] for run in runs) for key in COUNTS},
        "seeds": seeds,
        "phases": setting.phases,
        "requests": statistics.fmean(run["requests"] for run in runs),
        "mix": setting.mix,
        "window_requests": setting.window,
        "training_s": setting.training_seconds,
        "horizon_s": cost_policy(setting).horizon,
        "profile": setting.profile.engine or "measured",
        "drafts": dict(setting.trained_on),
    }


def _spread(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def _setting() -> Setting:
    scores, trained = load()
    path = corpus.DATA / "profile.json"
    profile = EngineProfile.model_validate_json(path.read_text()) if path.exists() else STATED_PROFILE
    return Setting(scores={name: unlabelled(scores[name]) for name in trained}, trained_on=trained, profile=profile)


def _replay(setting: Setting, rng: np.random.Generator) -> dict[str, Any]:
    """Every policy on one sequence of requests."""
    traffic = draw(setting, rng)
    # The first draft is there, made for the first phase: every policy but "never" would begin by training it.
    start = str(rng.choice(sorted(d for d, w in setting.trained_on.items() if w == traffic.workload[0])))
    seed = int(rng.integers(2**31))
    found: dict[str, Any] = {"requests": len(traffic.rows)}
    for name, run in POLICIES.items():
        service = Service(setting, traffic, np.random.default_rng(seed), start)
        counts = run(service)
        throughput = service.tokens / service.clock
        found[name] = {"throughput": throughput, "trainings": service.trainings, "swaps": service.swaps, **counts}
    return found


# --- the others ---


def _never(service: Service) -> dict[str, Any]:
    while not service.done:
        service.serve()
    return {}


def _always(service: Service) -> dict[str, Any]:
    """A training at every window that finds the device free; what comes of it serves, unjudged."""
    while not service.done:
        service.serve()
        if made := service.finished():
            service.swap(made[0])
        if not service.training:
            service.train()
    return {}


def _best(service: Service) -> dict[str, Any]:
    """No policy: the best draft of each window, known before it is served, without training."""
    setting = service.setting
    while not service.done:
        rows = service.traffic.rows[service.served : service.served + setting.window]
        service.swap(min(setting.scores, key=lambda name: int(setting.scores[name].verify_steps[rows].sum())))
        service.serve()
    return {}


def _ema(service: Service) -> dict[str, Any]:
    """The published rule; its averages begin anew with each draft."""
    short = long = None
    while not service.done:
        stats = service.serve()
        fired = False
        for rate in stats.rate:
            short = rate if short is None else EMA_SHORT * short + (1 - EMA_SHORT) * rate
            long = rate if long is None else EMA_LONG * long + (1 - EMA_LONG) * rate
            fired = fired or short < long - EMA_DROP
        if (made := service.finished()) and _better_by_means(service, *made):
            service.swap(made[0])
            short = long = None
        if fired and not service.training:
            service.train()
    return {}


def _better_by_means(service: Service, draft: str, began: int) -> bool:
    evaluated = service.traffic.rows[service.newest(service.traffic.gate, 200)]
    trained_on = service.traffic.rows[max(began - service.setting.window, 0) : began]
    new, old = service.setting.scores[draft], service.setting.scores[service.serving]
    rates = [s.accepted[rows] / np.maximum(s.proposed[rows], 1) for s, rows in ((new, evaluated), (old, trained_on))]
    return bool(rates[0].mean() > rates[1].mean())


POLICIES: dict[str, Run] = {"always": _always, "never": _never, "ema": _ema, "ours": ours, "best": _best}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(measure(options.seeds, options.first_seed), indent=2))
