"""A service in simulated time: phases of real requests, one draft in serving, trainings on another device.

Owns the clock, what is served, and when a training is done. Knows nothing of the policies that decide what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.bench.decisions import corpus
from tests.bench.decisions.corpus import Scores
from tests.bench.decisions.reports import digest_of, draft_steps
from tide.domain import EngineProfile
from tide.sglang_plugin.admission import length_bucket
from tide.states.request_stats import RequestStats, stats_from_table
from tide.states.requests import REQUEST_SCHEMA, request_row
from tide.throughput import prediction as throughput

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.str_]

GATE_SHARE, SELECTION_SHARE = 0.10, 0.05


@dataclass(frozen=True)
class Setting:
    """What a replay is made of."""

    scores: Mapping[str, Scores]
    """By draft, on the same requests in the same order."""
    trained_on: Mapping[str, str]
    """Workload by draft; a training on a workload yields one of its drafts."""
    profile: EngineProfile
    concurrency: int = 8
    phases: int = 20
    window_s: float = 300.0
    """Between two looks, at the mean speed of all drafts: policy.capture.window_s."""
    phase_windows: tuple[int, int] = (8, 24)
    """Least and most windows of a phase."""
    mix: float = 0.95
    """Share of a phase's requests that are of its own workload; the others are drawn from all."""
    training_windows: float = 2.0
    """How long a training takes."""

    @cached_property
    def workloads(self) -> list[str]:
        """Those that drafts were trained on."""
        return sorted(set(self.trained_on.values()))

    @cached_property
    def any_scores(self) -> Scores:
        """What does not depend on the draft."""
        return next(iter(self.scores.values()))

    @cached_property
    def steps(self) -> int:
        """Draft steps of a verify step."""
        return draft_steps(self.any_scores)

    @cached_property
    def step_seconds(self) -> float:
        """Engine-seconds of one request's verify step: a step of the batch, shared by all in it."""
        point = throughput.point_at(self.profile, self.concurrency)
        return (point.draft_step_s * self.steps + point.verify_step_s) / self.concurrency

    @cached_property
    def window(self) -> int:
        """Requests between two looks."""
        steps = float(np.mean([s.verify_steps.mean() for s in self.scores.values()]))
        return round(self.window_s / (steps * self.step_seconds))

    @property
    def training_seconds(self) -> float:
        """Duration of a training on one device."""
        return self.training_windows * self.window_s

    @cached_property
    def stats(self) -> dict[str, RequestStats]:
        """By draft, all requests of the corpus as the drift gate sees them, in the order of the scores."""
        return {name: _stats_of(name, scores, _inputs()) for name, scores in self.scores.items()}


@dataclass(frozen=True)
class Traffic:
    """One sequence of requests; every policy serves the same."""

    rows: Ints
    """[n] row of the corpus."""
    workload: Words
    """[n] of the phase."""
    gate: Bools
    selection: Bools


def draw(setting: Setting, rng: np.random.Generator) -> Traffic:
    """Phases of random length and workload, no two alike in a row; each request a whole conversation of the corpus."""
    by_workload = {w: np.flatnonzero(setting.any_scores.workload == w) for w in setting.workloads}
    everything = np.concatenate(list(by_workload.values()))
    rows, names, last = [], [], ""
    for _ in range(setting.phases):
        last = str(rng.choice([w for w in setting.workloads if w != last]))
        low, high = setting.phase_windows
        count = int(rng.integers(low, high + 1)) * setting.window
        own = rng.random(count) < setting.mix
        rows.append(np.where(own, rng.choice(by_workload[last], count), rng.choice(everything, count)))
        names.append(np.full(count, last))
    bucket = rng.random(sum(map(len, rows)))
    gate = bucket < GATE_SHARE
    return Traffic(np.concatenate(rows), np.concatenate(names), gate, ~gate & (bucket < GATE_SHARE + SELECTION_SHARE))


@dataclass
class Service:
    """What serves, what is trained, and what time it is."""

    setting: Setting
    traffic: Traffic
    rng: np.random.Generator
    serving: str
    clock: float = 0.0
    served: int = 0
    tokens: int = 0
    trainings: int = 0
    swaps: int = 0
    history: list[str] = field(default_factory=list)
    """Drafts in the order they came into serving."""
    _training: tuple[float, str, int] | None = None

    def __post_init__(self) -> None:
        self.history.append(self.serving)

    @property
    def done(self) -> bool:
        """True when all requests were served."""
        return self.served >= len(self.traffic.rows)

    @property
    def training(self) -> bool:
        """True while a training runs or its draft waits."""
        return self._training is not None

    def serve(self) -> RequestStats:
        """Serve one window; returns what the request table says of it."""
        rows = self.traffic.rows[self.served : self.served + self.setting.window]
        scores = self.setting.scores[self.serving]
        ends = self.clock + np.cumsum(scores.verify_steps[rows]) * self.setting.step_seconds
        self.served += len(rows)
        self.tokens += int(scores.tokens[rows].sum())
        self.clock = float(ends[-1])
        stats = self.setting.stats[self.serving].take(rows)
        # A row that is drawn again stands for another request, of another conversation.
        ids = np.array([str(n) for n in range(self.served - len(rows), self.served)])
        renamed = {f.name: ids for f in fields(stats) if f.name in ("request", "conversation")}
        return replace(stats, finished_at=ends, **renamed)

    def train(self) -> None:
        """Start a training on what was served last; it yields a draft of that workload."""
        assert not self.training
        workload = self.traffic.workload[self.served - 1]
        fitting = sorted(d for d, w in self.setting.trained_on.items() if w == workload)
        self.trainings += 1
        self._training = (self.clock + self.setting.training_seconds, str(self.rng.choice(fitting)), self.served)

    def finished(self) -> tuple[str, int] | None:
        """The draft of a training that is done, and how many requests had been served when it began; taken once."""
        if self._training is None or self._training[0] > self.clock:
            return None
        (_, draft, began), self._training = self._training, None
        return draft, began

    def swap(self, draft: str) -> None:
        """Put another draft into serving."""
        if draft != self.serving:
            self.serving = draft
            self.swaps += 1
            self.history.append(draft)

    def newest(self, split: Bools, count: int) -> Ints:
        """Numbers of the newest served requests of a split, oldest first."""
        return np.flatnonzero(split[: self.served])[-count:]


def unlabelled(scores: Scores) -> Scores:
    """Slices as the plugin names them when clients name none: a workload that comes is no slice that was known before,
    by which the drift rule would expect its acceptance and the gate would protect it.
    """
    inputs = _inputs()
    scripts = [inputs.get(str(request), {}).get("script") or "none" for request in scores.request]
    names = [f"{s}-{length_bucket(int(n))}" for s, n in zip(scripts, scores.prompt_tokens, strict=True)]
    return replace(scores, slice=np.array(names, dtype=np.str_))


@lru_cache
def _inputs() -> dict[str, dict[str, object]]:
    """What requests.parquet says, by request."""
    return {row["request"]: row for row in corpus.load_requests().to_pylist()}


def _stats_of(name: str, scores: Scores, inputs: Mapping[str, Mapping[str, object]]) -> RequestStats:
    rows: Sequence[dict[str, object]] = [
        request_row(
            str(request),
            float(place),
            float(place),
            conversation=str(scores.conversation[place]),
            slice=str(scores.slice[place]),
            sampling="greedy",
            draft=digest_of(name),
            prompt_tokens=int(scores.prompt_tokens[place]),
            response_tokens=int(scores.tokens[place]),
            verify_steps=int(scores.verify_steps[place]),
            proposed=int(scores.proposed[place]),
            accepted=int(scores.accepted[place]),
            **{key: inputs.get(str(request), {}).get(key) for key in ("script", "token_sketch", "pooled")},
        )
        for place, request in enumerate(scores.request)
    ]
    return stats_from_table(pa.Table.from_pylist(list(rows), schema=REQUEST_SCHEMA))
