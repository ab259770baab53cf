"""What a replica's ``/metrics`` says now: SGLang's own gauges and the plugin's counters.

Owns the names in that page. Knows nothing of what is made of the figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tide.engine.live import LiveFigures
from tide.errors import EngineError, EngineUnavailable

ACCEPT_LENGTH = "sglang:spec_accept_length"
RUNNING = "sglang:num_running_reqs"
CAPTURE = "tide_capture_"


def read_live(name: str, url: str, *, timeout_s: float, transport: httpx.BaseTransport | None = None) -> LiveFigures:
    """Read a replica's figures.

    Args:
        name: of the replica, for the error.
        transport: stands in for the network in tests.

    Raises:
        EngineUnavailable: no answer.
        EngineError: no metrics there, or no page of metrics.
    """
    try:
        with httpx.Client(timeout=timeout_s, transport=transport, trust_env=False, follow_redirects=True) as client:
            answer = client.get(f"{url.rstrip('/')}/metrics")
    except httpx.TransportError as error:
        raise EngineUnavailable(f"{name}: GET /metrics: {type(error).__name__}: {error}") from error
    if not answer.is_success:
        raise EngineError(f"{name}: /metrics: {answer.status_code}: start SGLang with --enable-metrics")
    return parse(name, answer.text)


def parse(name: str, page: str) -> LiveFigures:
    """Figures in a page of Prometheus text. Raises EngineError when it is none."""
    found: dict[str, list[float]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name].append(sample.value)
    except ValueError as error:
        raise EngineError(f"{name}: /metrics is no page of Prometheus metrics: {error}") from error
    lengths = [value for value in found[ACCEPT_LENGTH] if value > 0]  # 0 until the first verify step of an interval
    return LiveFigures(
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        running=_sum(found[RUNNING]),
        capture={
            key.removeprefix(CAPTURE): sum(values)
            for key, values in found.items()
            if key.startswith(CAPTURE) and not key.endswith("_created")
        },
    )


def _sum(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) if listed else None
