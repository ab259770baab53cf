"""Counts of what the tap took, lost and left out, by reason, and their mirror in Prometheus.

Owns names and units: ``dropped`` is in rows (a fault, or want of room), ``excluded`` in requests (policy). Knows
nothing of the engine. Counting never raises and never waits for more than a dictionary update.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

logger = logging.getLogger("tide.capture")


class CaptureCounters:
    """Thread-safe counters; the scheduler thread and the writer thread share one instance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._reported: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._warned: set[str] = set()

    def drop(self, reason: str, rows: int) -> None:
        """Rows lost by a fault or for want of room. The first of each reason is logged."""
        with self._lock:
            self._dropped[reason] += rows
        self.warn_once(f"drop:{reason}", f"capture drops rows: {reason} ({rows} now; further ones are only counted)")

    def exclude(self, reason: str) -> None:
        """One request that policy leaves out."""
        with self._lock:
            self._excluded[reason] += 1

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a total: ``requests``, ``rows``, ``shards``, ``missing_prompt_rows`` ..."""
        with self._lock:
            self._totals[name] += amount

    def gauge(self, name: str, value: float) -> None:
        """Set a level: ``enabled``, ``queue_bytes``, ``store_bytes``, ``spool_bytes``."""
        with self._lock:
            self._gauges[name] = value

    def warn_once(self, key: str, message: str) -> None:
        """Log a warning the first time that this key is seen."""
        with self._lock:
            seen = key in self._warned
            self._warned.add(key)
        if not seen:
            logger.warning("tide: %s", message)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers since the start: totals and gauges by name, ``dropped`` and ``excluded`` by reason."""
        with self._lock:
            return {
                **self._totals,
                **self._gauges,
                "dropped": dict(self._dropped),
                "excluded": dict(self._excluded),
            }

    def period(self) -> tuple[dict[str, int], dict[str, int]]:
        """What was dropped and excluded since the last ``close_period``, by reason."""
        with self._lock:
            dropped, excluded = self._dropped - self._reported[0], self._excluded - self._reported[1]
        return dict(dropped), dict(excluded)

    def close_period(self, dropped: dict[str, int], excluded: dict[str, int]) -> None:
        """These were written down: the next period starts after them."""
        with self._lock:
            self._reported = (self._reported[0] + Counter(dropped), self._reported[1] + Counter(excluded))


class PrometheusMirror:
    """Publishes the counters as ``tide_capture_*``.

    SGLang serves ``/metrics`` from another process and collects through PROMETHEUS_MULTIPROC_DIR, so the client is
    imported here, late, when that variable is set.
    """

    TOTALS = ("requests", "rows", "shards", "missing_prompt_rows")
    GAUGES = ("enabled", "queue_bytes", "store_bytes", "spool_bytes")

    def __init__(self) -> None:
        from prometheus_client import Counter as Metric
        from prometheus_client import Gauge

        self._totals = {n: Metric(f"tide_capture_{n}", f"Captured: {n.replace('_', ' ')}") for n in self.TOTALS}
        self._dropped = Metric("tide_capture_dropped_rows", "Rows lost by a fault or for want of room", ["reason"])
        self._excluded = Metric("tide_capture_excluded_requests", "Requests that policy leaves out", ["reason"])
        self._gauges = {
            n: Gauge(f"tide_capture_{n}", f"Capture: {n.replace('_', ' ')}", multiprocess_mode="livesum")
            for n in self.GAUGES
        }
        self._published: Counter[tuple[str, str]] = Counter()

    def sync(self, snapshot: dict[str, Any]) -> None:
        """Bring the metrics up to a snapshot of CaptureCounters."""
        for name, total in self._totals.items():
            total.inc(self._delta("total", name, int(snapshot.get(name, 0))))
        for reason, rows in snapshot["dropped"].items():
            self._dropped.labels(reason).inc(self._delta("dropped", reason, rows))
        for reason, requests in snapshot["excluded"].items():
            self._excluded.labels(reason).inc(self._delta("excluded", reason, requests))
        for name, gauge in self._gauges.items():
            gauge.set(snapshot.get(name, 0))

    def _delta(self, kind: str, name: str, now: int) -> int:
        delta = now - self._published[kind, name]
        self._published[kind, name] = now
        return delta
