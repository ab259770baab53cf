"""`tide status`: the state of a service gathered from wherever it can be read, each source by itself.

Owns what is asked and that one source that fails hides no other. Works over the ports. How it looks is in
``status_text``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from tide.domain import DriftReport, Promotion, Record, Value, Verdict
from tide.engine.base import Engine
from tide.engine.live import Live
from tide.errors import TideError
from tide.lineage import ledger_tail
from tide.promotion import verdict_text
from tide.store.base import Store
from tide.watching.observed import Backlog, ReplicaView, ServingView, backlog, replica_views, serving_view
from tide.watching.waiting import Waiting, waiting

T = TypeVar("T")


@dataclass(frozen=True)
class Sources:
    """Where a service is read from."""

    service: str
    store: Store
    repository: str
    """The drafts repository."""
    replicas: Sequence[Engine]
    live: Live
    spool: Path
    window_s: Callable[[], int]
    """Length of a harvest window; reads the policy, which may be broken."""


class Part(Value):
    """One process of the local stack."""

    name: str
    state: str
    pid: int | None = None
    url: str = ""
    memory_bytes: int = 0
    since: str = ""


class Happening(Value):
    """The newest record of a kind, and why in one sentence."""

    kind: Literal["drift", "verdict", "promotion", "rollback"]
    at: float
    """When it was decided, seconds since the epoch."""
    outcome: str
    why: str


class Acceptance(Value):
    """Acceptance RATE (accepted over proposed draft tokens) by the newest drift report."""

    at: float
    """When the report was written."""
    rate: float | None = None
    """None: the report judged no measured requests."""
    baseline: float | None = None
    """What the frozen baseline expects of the same requests; None while it is warming, or without a draft."""
    cusum: float | None = None
    """Running sum of losses, in standard deviations."""
    threshold: float | None = None
    """The sum that makes it a retrain."""
    length_at_promotion: float | None = None
    """Acceptance LENGTH of the serving draft in the newest verdict on it, walked offline."""


class Status(Value):
    """The whole screen. A part that could not be read is None, and ``errors`` has why by the part's name."""

    service: str
    at: float
    """When it was gathered, seconds since the epoch."""
    serving: ServingView | None
    replicas: tuple[ReplicaView, ...]
    acceptance: Acceptance | None
    last: tuple[Happening, ...]
    """Newest first."""
    waiting: tuple[Waiting, ...] | None
    spool: Backlog | None
    parts: tuple[Part, ...]
    errors: dict[str, str]

    @property
    def blind(self) -> bool:
        """True when nothing of the service could be read."""
        return not (self.serving or self.last or self.spool or any(r.reachable for r in self.replicas)) and bool(
            self.errors
        )


def gather(sources: Sources, parts: Sequence[Part], now: float) -> Status:
    """Ask every source at once; takes as long as the slowest. Raises nothing that a source raises.

    Args:
        now: seconds since the epoch.
    """
    errors: dict[str, str] = {}

    def got(name: str, future: Future[T]) -> T | None:
        try:
            return future.result()
        except (TideError, ValidationError, OSError) as error:
            errors[name] = " ".join(str(error).split())
            return None

    with ThreadPoolExecutor(5, thread_name_prefix="status") as pool:
        serving = pool.submit(lambda: serving_view(sources.store, sources.repository))
        records = pool.submit(lambda: ledger_tail.newest(sources.store, sources.repository, "drift", "verdict"))
        waits = pool.submit(lambda: tuple(waiting(sources.store, sources.repository)))
        spool = pool.submit(lambda: backlog(sources.spool, now, sources.window_s()))
        replicas = pool.submit(lambda: tuple(replica_views(sources.replicas, sources.live)))
        found = got("serving", serving)
        known = got("ledger", records) or {}
        return Status(
            service=sources.service,
            at=now,
            serving=found,
            replicas=got("replicas", replicas) or (),
            acceptance=_acceptance(known, found),
            last=_last(known, found),
            waiting=got("waiting", waits),
            spool=got("spool", spool),
            parts=tuple(parts),
            errors=errors,
        )


def _acceptance(known: dict[str, tuple[ledger_tail.Entry, Record]], serving: ServingView | None) -> Acceptance | None:
    if "drift" not in known:
        return None
    entry, report = known["drift"]
    assert isinstance(report, DriftReport)
    verdict = known["verdict"][1] if "verdict" in known else None
    same = isinstance(verdict, Verdict) and serving is not None and verdict.candidate == serving.draft
    return Acceptance(
        at=entry.at,
        rate=report.figures.get("rate"),
        baseline=report.figures.get("expected_rate"),
        cusum=report.figures.get("cusum"),
        threshold=report.figures.get("cusum_threshold"),
        length_at_promotion=verdict.overall.candidate if same and isinstance(verdict, Verdict) else None,
    )


def _last(known: dict[str, tuple[ledger_tail.Entry, Record]], serving: ServingView | None) -> tuple[Happening, ...]:
    found = [_decided(*pair) for pair in known.values()]
    found += [_changed(serving.change)] if serving and serving.change else []
    return tuple(sorted(found, key=lambda happening: happening.at, reverse=True))


def _decided(entry: ledger_tail.Entry, record: Record) -> Happening:
    if isinstance(record, DriftReport):
        cause = f" ({record.cause})" if record.cause else ""
        return Happening(kind="drift", at=entry.at, outcome=f"{record.decision}{cause}", why=_first(record.reasons))
    assert isinstance(record, Verdict)
    return Happening(kind="verdict", at=entry.at, outcome=record.outcome, why=verdict_text.sentence(record))


def _changed(record: Promotion) -> Happening:
    replicas = ", ".join(f"{swap.replica} in {swap.seconds:.2f} s" for swap in record.replicas) or "no replica"
    before = f" in place of {record.previous[:12]}" if record.previous else ""
    why = f"draft {record.draft[:12]}{before} on {replicas}."
    return Happening(kind=record.kind, at=record.at, outcome=f"generation {record.generation}", why=why)


def _first(reasons: Sequence[str]) -> str:
    return f"{reasons[0]}." if reasons else "no reason was recorded."
