"""A service's load: how many requests ran while its tokens were generated, and how long requests are.

Owns how both are read off the request table. Knows nothing of what a step costs or of how tables are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tide.domain import PROBE_SLICE
from tide.errors import EvaluationError

TICK_S = 1e-3
"""An answer that took no time by its clock took this long."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ServiceLoad:
    """What a prediction of throughput needs to know of the traffic. Without a request all of it is empty or 0."""

    concurrency: dict[int, float]
    """Share of the output tokens generated with so many requests running on their replica; sums to 1."""
    prompt_tokens: float
    """Mean prompt tokens of a request that were not cached."""
    output_tokens: float
    """Mean tokens of an answer."""
    requests: int
    left_out: int = 0
    """Requests that ended before they began by their host's clock: nobody knows when they ran."""


def concurrency_histogram(
    started_at: npt.ArrayLike, finished_at: npt.ArrayLike, response_tokens: npt.ArrayLike
) -> dict[int, float]:
    """Share of the output tokens generated with so many requests running; a request's tokens are spread evenly.

    One sort and one pass over starts and ends.

    Args:
        started_at, finished_at: [n] seconds, of ONE engine.
        response_tokens: [n] tokens of the answers.

    Returns:
        Shares by concurrency, which sum to 1; empty when no token was generated.

    Raises:
        EvaluationError: a time is not finite, a request ended before it began, or a count is below 0.
    """
    start, finish, tokens = (np.asarray(a, dtype=np.float64) for a in (started_at, finished_at, response_tokens))
    _check(start, finish, tokens)
    if not tokens.sum() > 0:
        return {}
    # Seconds since the epoch leave few digits for the milliseconds that count here.
    origin = start.min()
    start = start - origin
    finish = np.maximum(finish - origin, start + TICK_S)
    speed = tokens / (finish - start)
    times = np.concatenate([start, finish])
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.repeat([1, -1], len(start))[order])[:-1]
    rate = np.cumsum(np.concatenate([speed, -speed])[order])[:-1]
    # Rounding leaves a trace of those that ended; while nothing runs, nothing is generated.
    made = np.where(running > 0, np.maximum(rate, 0.0), 0.0) * np.diff(times[order])
    totals = np.bincount(running, weights=made)
    return {int(b): float(totals[b] / totals.sum()) for b in np.flatnonzero(totals)}


def service_load(tables: Iterable[Any]) -> ServiceLoad:
    """The load of a service from its request tables.

    Args:
        tables: one ``pyarrow.Table`` a replica, with the columns of `tide.states.requests.REQUEST_SCHEMA`: requests of
            different replicas share no step.
    """
    weights: dict[int, float] = {}
    prompt, output, requests, left_out = 0.0, 0.0, 0, 0
    for table in tables:
        own, backwards = _own(table)
        tokens = own["response_tokens"]
        left_out += backwards
        for b, share in concurrency_histogram(own["started_at"], own["finished_at"], tokens).items():
            weights[b] = weights.get(b, 0.0) + share * float(tokens.sum())
        prompt += float((own["prompt_tokens"] - own["cached_tokens"]).sum())
        output += float(tokens.sum())
        requests += len(tokens)
    if not output:
        return ServiceLoad({}, 0.0, 0.0, requests, left_out)
    shares = {b: weight / sum(weights.values()) for b, weight in sorted(weights.items())}
    return ServiceLoad(shares, prompt / requests, output / requests, requests, left_out)


def _own(table: Any) -> tuple[dict[str, Floats], int]:
    """Columns of the requests of the service's users, as arrays, and how many were left out for their times."""
    names = ("started_at", "finished_at", "response_tokens", "prompt_tokens", "cached_tokens")
    columns = {name: np.array(table[name].to_numpy(), dtype=np.float64) for name in names}
    users = np.array([name != PROBE_SLICE for name in table["slice"].to_pylist()], dtype=np.bool_)
    kept = users & (columns["finished_at"] >= columns["started_at"])
    return {name: column[kept] for name, column in columns.items()}, int(users.sum() - kept.sum())


def _check(start: Floats, finish: Floats, tokens: Floats) -> None:
    if not (np.isfinite(start).all() and np.isfinite(finish).all() and np.isfinite(tokens).all()):
        raise EvaluationError("a start, a finish or a count of the request table is not finite: look at its window")
    if wrong := np.flatnonzero((finish < start) | (tokens < 0)).tolist():
        at = wrong[0]
        raise EvaluationError(
            f"request {at} of the table made {tokens[at]:.0f} tokens from {start[at]:.3f} to {finish[at]:.3f}: "
            "look at the serving host's clock"
        )
