"""The watch on a canary: what the candidate serves, paired with both drafts' walks over the very same requests.

Owns which requests speak, how live counters and logged states find each other, and that a replica which stops
generating ends the canary. Reads the replica's request table and shards from the spool of this host, files that are
closed only; links them, so that a harvest may take them meanwhile. Works over the engine and evaluator ports. Knows
nothing of ``serving.json``; the decision is in ``rule``.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tide.canary import rule as canary
from tide.canary.rule import Compared
from tide.canary.spool import Served, SpoolView
from tide.domain import CanaryReport, RequestScore
from tide.engine.base import Engine, EngineFacts
from tide.errors import EngineError, EngineUnavailable, ShardError
from tide.evaluator.base import Evaluator
from tide.policies import CanaryPolicy

PULSE_S = 10.0
"""Seconds between two answers that are asked of the canary while it generates."""


@dataclass(frozen=True)
class CanaryWatch:
    """Watches one canary; called by a trial (`tide.serving.site.Watch`).

    Args:
        spool: of the replicas on this host.
        scratch: folder for the links, emptied at the end.
        draft_dir: DRAFT_DIR: holds candidate and incumbent by digest.
        bundle: head-only target.
        evaluator: makes the evaluator once there is something to walk.
    """

    spool: Path
    scratch: Path
    draft_dir: Path
    bundle: Path
    evaluator: Callable[[], Evaluator]
    policy: CanaryPolicy
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep

    def __call__(
        self,
        replica: Engine,
        *,
        candidate: str,
        incumbent: str | None,
        since: float,
        still_ours: Callable[[], None],
    ) -> CanaryReport:
        """See `tide.serving.site.Watch`. A watch that can see nothing says why, and lets the candidate pass at once."""
        facts, began = replica.facts(), self.clock()
        dark = () if self.spool.is_dir() else (f"the spool {self.spool} does not exist here: set TIDE_SPOOL",)
        with _captured_whole(replica, facts) as blind, SpoolView(self.spool, self.scratch, candidate, since) as view:
            walks = Walks(self, facts, candidate, incumbent)
            pulse = Pulse(replica, candidate, self.policy.answer_s, self.clock)
            while True:
                still_ours()
                view.look()
                compared = walks.compare(view)
                report = canary.decide(compared, view.rates, self.policy, elapsed_s=self.clock() - began)
                if report is None and (dark or blind):
                    report = CanaryReport(outcome="passed", reasons=("nothing could be watched",))
                if report is None or report.good:
                    stopped = pulse.stopped(now=report is not None)
                    # Nothing passes while it is silent: it answers again, or has been silent for too long.
                    report = stopped or (None if pulse.silent else report)
                if report is not None:
                    return report.model_copy(update={"reasons": (*report.reasons, *dark, *blind, *walks.unread)})
                self.wait(self.policy.poll_s)


@dataclass
class Walks:
    """Both drafts' walks, request by request, each made once."""

    watch: CanaryWatch
    facts: EngineFacts
    candidate: str
    incumbent: str | None
    unread: list[str] = field(default_factory=list)
    """Shards that could not be read, and why."""
    _compared: list[Compared] = field(default_factory=list)
    _made: Evaluator | None = None

    def compare(self, view: SpoolView) -> list[Compared]:
        """All requests compared so far; those that are new in the spool are walked now."""
        by_shard: dict[tuple[Path, float], list[Served]] = defaultdict(list)
        for shard, served in view.take_walkable(self.watch.policy.max_requests - len(self._compared)):
            by_shard[shard, served.temperature].append(served)
        for (shard, temperature), requests in by_shard.items():
            try:
                self._compare(shard, temperature, requests)
            except ShardError as error:
                self.unread.append(str(error))
        return self._compared

    def _compare(self, shard: Path, temperature: float, requests: list[Served]) -> None:
        ours = self._walk(self.candidate, shard, temperature, requests)
        theirs = self._walk(self.incumbent, shard, temperature, requests) if self.incumbent else None
        for request in requests:
            if request.request in ours and (theirs is None or request.request in theirs):
                incumbent = None if theirs is None else theirs[request.request]
                self._compared.append(Compared(request.rate, ours[request.request], incumbent))

    def _walk(self, draft: str, shard: Path, temperature: float, requests: list[Served]) -> dict[str, float]:
        """Acceptance rate by request."""
        self._made = self._made or self.watch.evaluator()
        topk = self.facts.speculative_topk
        scores = self._made.walk(
            self.watch.draft_dir / draft,
            [shard],
            {request.request for request in requests},
            bundle=self.watch.bundle,
            steps=self.facts.speculative_steps,
            topk=topk,
            draft_tokens=self.facts.draft_tokens if topk > 1 else None,
            temperature=temperature,
        )
        return {score.request: _rate(score) for score in scores if score.proposed}


@dataclass
class Pulse:
    """Whether the canary still generates, with the candidate."""

    replica: Engine
    candidate: str
    answer_s: float
    clock: Callable[[], float]
    _last: float | None = None
    _silent_since: float | None = None

    @property
    def silent(self) -> bool:
        """True when it did not answer the last time."""
        return self._silent_since is not None

    def stopped(self, *, now: bool) -> CanaryReport | None:
        """Why the canary has failed; None while it generates, or has not been silent for long.

        Args:
            now: ask, however long ago it answered.
        """
        began = self.clock()
        if not now and self._last is not None and began - self._last < PULSE_S:
            return None
        try:
            reason = self._wrong()
        except EngineUnavailable as error:
            self._silent_since = began if self._silent_since is None else self._silent_since
            silent = self.clock() - self._silent_since
            still_waiting = silent < self.answer_s
            reason = None if still_waiting else f"{self.replica.name} has not generated for {silent:.0f} s: {error}"
        except EngineError as error:
            reason = str(error)
        else:
            self._last, self._silent_since = self.clock(), None
        return None if reason is None else CanaryReport(outcome="failed", reasons=(reason,))

    def _wrong(self) -> str | None:
        """What is wrong with a replica that answers. Raises EngineUnavailable, EngineError."""
        draft = self.replica.active_draft()
        if draft != self.candidate:
            return f"{self.replica.name} serves {draft[:12]} by now: it started again, or was swapped by others"
        if not self.replica.probe(timeout_s=self.answer_s).verify_steps:
            return f"{self.replica.name} generates without verify steps by now"
        return None


@contextlib.contextmanager
def _captured_whole(replica: Engine, facts: EngineFacts) -> Iterator[tuple[str, ...]]:
    """Capture the states of every request meanwhile; why there are none, when there are none."""
    rate = facts.capture.get("sample_rate")
    try:
        replica.set_capture_rate(1.0)
    except EngineError as error:
        yield (f"states cannot be captured: {error}",)
        return
    try:
        yield ()
    finally:
        if isinstance(rate, (int, float)):
            # One that does not answer captures at its own rate once it starts again; the next cycle sets it anyhow.
            with contextlib.suppress(EngineError):
                replica.set_capture_rate(float(rate))


def _rate(score: RequestScore) -> float:
    return float(score.accepted / score.proposed)
