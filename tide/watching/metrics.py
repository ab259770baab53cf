"""Prometheus metrics of the pipeline, beside SGLang's: ledger, serving.json, spool and replicas, read at a scrape.

Owns names, types and units of every ``tide_*`` metric but the plugin's ``tide_capture_*``. Works over the ports; keeps
nothing but what it has read of the ledger, so that an exporter may be started and ended at will. A source that cannot
be reached sets ``tide_up`` to 0 and leaves its metrics out: a figure that is not known is absent, never 0. What was
read of the ledger stays true, and stays.

Counters come from the ledger whole: they appear once it was read to its end, so that a start never looks like a burst.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError

from tide.domain import DriftReport
from tide.errors import StoreUnavailable, TideError
from tide.lineage.ledger_tail import LedgerTail
from tide.watching.observed import Backlog, ReplicaView, ServingView, backlog, replica_views, serving_view
from tide.watching.status import Sources
from tide.watching.waiting import Waiting, waiting

T = TypeVar("T")

CACHE_S = 5.0
"""Scrapes closer together than this share one look."""
DECISIONS = ("none", "watch", "retrain")
OUTCOMES = ("promote", "reject", "inconclusive")
_FIGURES = {
    "tide_cusum": ("cusum", "Running sum of losses of acceptance rate, in standard deviations, at the last report"),
    "tide_cusum_threshold": ("cusum_threshold", "The sum of losses that makes it a retrain"),
    "tide_acceptance_rate": ("rate", "Accepted over proposed draft tokens of the requests that the last report judged"),
    "tide_acceptance_rate_baseline": ("expected_rate", "What the frozen baseline expects of the same requests"),
}


class PipelineCollector(Collector):
    """All metrics of a service, for a ``CollectorRegistry``. Thread-safe: scrapes may come side by side.

    Args:
        sources: where the service is read from.
        quota_bytes: what the spool may hold.
        clock: seconds since the epoch.
    """

    def __init__(self, sources: Sources, *, quota_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._sources, self._quota, self._clock = sources, quota_bytes, clock
        self._tail = LedgerTail(sources.store, sources.repository)
        self._lock, self._at, self._found = Lock(), float("-inf"), list[Metric]()
        self._waits, self._waits_of = list[Waiting](), ("", -1)

    def describe(self) -> list[Metric]:
        """Nothing: a registry would otherwise ask every source when the collector is registered."""
        return []

    def collect(self) -> list[Metric]:
        """One look at every source, or the last one when it is fresh. Never raises what a source raises."""
        with self._lock:
            if self._clock() - self._at > CACHE_S:
                self._found = list(self._look())
                self._at = self._clock()
            return self._found

    def _look(self) -> Iterator[Metric]:
        now, sources, up = self._clock(), self._sources, dict[str, bool]()
        serving = _ask(up, "serving", lambda: serving_view(sources.store, sources.repository))
        _ask(up, "ledger", self._tail.look)
        waits = _ask(up, "approvals", lambda: self._waiting(serving, reached=up["ledger"]))
        spool = _ask(up, "spool", lambda: backlog(sources.spool, now, sources.window_s()))
        replicas = replica_views(sources.replicas, sources.live)
        up |= {f"replica:{replica.name}": replica.reachable for replica in replicas}
        yield from ledger_metrics(self._tail)
        yield from serving_metrics(serving, now) if serving else ()
        yield from waiting_metrics(waits, now) if waits is not None else ()
        yield from spool_metrics(spool, self._quota) if spool else ()
        yield from replica_metrics(replicas, serving)
        values = {("source", name): float(reached) for name, reached in up.items()}
        yield _gauge("tide_up", "Whether a source could be read at this scrape", values)

    def _waiting(self, serving: ServingView | None, *, reached: bool) -> list[Waiting]:
        """What waits, asked again only when the ledger or what serves has changed since."""
        if not reached:
            raise StoreUnavailable("the ledger could not be read at this scrape")
        state = (self._tail.head, serving.generation if serving else -1)
        if self._waits_of != state:
            self._waits, self._waits_of = waiting(self._sources.store, self._sources.repository), state
        return self._waits


def _ask(up: dict[str, bool], source: str, read: Callable[[], T]) -> T | None:
    """What a source says, or None; ``up`` keeps whether it could be read."""
    try:
        found = read()
    except (TideError, ValidationError, OSError):
        up[source] = False
        return None
    up[source] = True
    return found


def ledger_metrics(tail: LedgerTail) -> Iterator[Metric]:
    """What was decided so far. Counters once the ledger was read to its end."""
    yield _gauge("tide_ledger_unread_records", "Ledger records that are known and not read yet", tail.unread)
    yield _gauge("tide_ledger_unreadable_records", "Ledger records of another version of TIDE", tail.unreadable)
    if not tail.complete:
        return
    cycles = {name: tail.counts["drift", name] for name in DECISIONS}
    yield _counter("tide_cycles", "Cycles by what the drift gate decided", "decision", cycles)
    verdicts = {name: tail.counts["verdict", name] for name in OUTCOMES}
    yield _counter("tide_verdicts", "Verdicts by outcome", "outcome", verdicts)
    promotions, rollbacks = tail.counts["*", "promotion"], tail.counts["*", "rollback"]
    yield CounterMetricFamily("tide_promotions", "Drafts put into serving on a verdict", value=promotions)
    yield CounterMetricFamily("tide_rollbacks", "Returns to an earlier draft", value=rollbacks)
    records = {kind: count for (group, kind), count in sorted(tail.counts.items()) if group == "*"}
    yield _counter("tide_ledger_records", "Records of the ledger by kind", "kind", records)
    yield from _drift(tail)


def _drift(tail: LedgerTail) -> Iterator[Metric]:
    if "drift" not in tail.newest:
        return
    entry, report = tail.newest["drift"]
    assert isinstance(report, DriftReport)
    yield _gauge("tide_last_cycle_timestamp_seconds", "When the drift gate last decided", entry.at)
    states = {("decision", name): float(report.decision == name) for name in DECISIONS}
    yield _gauge("tide_drift_state", "1 for what the drift gate decided last", states)
    engine = float((report.decision, report.cause) == ("watch", "engine"))
    yield _gauge("tide_drift_engine_suspected", "1 while the engine lost the acceptance, and not the traffic", engine)
    for name, (figure, what) in _FIGURES.items():
        if (value := report.figures.get(figure)) is not None:
            yield _gauge(name, what, value)


def serving_metrics(serving: ServingView, now: float) -> Iterator[Metric]:
    """What serves, and since when."""
    what = "Generation of serving.json; 0 before the first promotion"
    yield _gauge("tide_serving_generation", what, serving.generation)
    yield _gauge("tide_serving_draft_info", "1 for the draft in serving", {("digest", serving.draft): 1.0})
    under_way = float(serving.canary is not None)
    yield _gauge("tide_rollout_under_way", "1 while serving.json holds a canary's lease", under_way)
    if serving.since is not None:
        yield _gauge("tide_serving_draft_age_seconds", "Since this generation began", max(now - serving.since, 0.0))


def waiting_metrics(found: list[Waiting], now: float) -> Iterator[Metric]:
    """What waits for a person, and how long."""
    yield _gauge("tide_approvals_waiting", "Promotions that wait for a person", len(found))
    oldest = max((now - one.since for one in found), default=0.0)
    yield _gauge("tide_approval_oldest_seconds", "How long the oldest promotion has waited; 0 when none waits", oldest)


def spool_metrics(found: Backlog, quota: int) -> Iterator[Metric]:
    """What no harvest has taken yet."""
    yield _gauge("tide_spool_backlog_bytes", "Bytes in the spool of this host, open windows included", found.size)
    yield _gauge("tide_spool_backlog_files", "Data files in the spool of this host, open windows included", found.files)
    yield _gauge("tide_spool_quota_bytes", "What the spool may hold before capture drops rows", quota)
    yield _gauge("tide_spool_quarantined_files", "Files that the harvest refused", found.quarantined)
    what = "Since the oldest window ended that is not harvested; 0 when all are"
    yield _gauge("tide_spool_oldest_seconds", what, found.oldest_closed_s or 0.0)


def replica_metrics(replicas: list[ReplicaView], serving: ServingView | None) -> Iterator[Metric]:
    """Whether each replica serves what serving.json says; left out where either is not known."""
    known = {("replica", r.name): float(match) for r in replicas if (match := r.matches(serving)) is not None}
    yield _gauge("tide_replica_matches_serving", "1 when a replica serves what serving.json says", known)


def _gauge(name: str, what: str, value: float | Mapping[tuple[str, str], float]) -> Metric:
    """One gauge; several values come by (label, its value)."""
    if not isinstance(value, Mapping):
        return GaugeMetricFamily(name, what, value=value)
    family = GaugeMetricFamily(name, what, labels=sorted({label for label, _ in value}))
    for (_, label), number in value.items():
        family.add_metric([label], number)
    return family


def _counter(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, what, labels=[label])
    for key, count in values.items():
        family.add_metric([key], count)
    return family
