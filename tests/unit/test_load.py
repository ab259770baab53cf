"""The load of a service: which share of its tokens was generated beside how many others, and how long requests are."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.domain import PROBE_SLICE
from tide.errors import EvaluationError
from tide.states.requests import REQUEST_SCHEMA, request_row
from tide.throughput.load import ServiceLoad, concurrency_histogram, service_load


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=REQUEST_SCHEMA)


def request(name: str, start: float, finish: float, tokens: int, **columns: Any) -> dict[str, Any]:
    return request_row(name, start, finish, response_tokens=tokens, **columns)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], {}),
        ([(0, 10, 0)], {}),
        ([(0, 10, 50)], {1: 1.0}),
        ([(0, 10, 50), (20, 30, 50)], {1: 1.0}),
        # One ends as the next begins: they never ran together.
        ([(0, 10, 50), (10, 20, 50)], {1: 1.0}),
        ([(0, 10, 50), (0, 10, 50), (0, 10, 7)], {3: 1.0}),
        # Half of each overlaps.
        ([(0, 10, 60), (5, 15, 60)], {1: 0.5, 2: 0.5}),
        # The inner one makes 20 tokens beside 10 of the outer's 100.
        ([(0, 100, 100), (40, 50, 20)], {1: 90 / 120, 2: 30 / 120}),
        # Who makes nothing still runs.
        ([(0, 10, 10), (0, 5, 0)], {1: 0.5, 2: 0.5}),
        # An answer within one tick of the clock counts beside who ran then.
        ([(0, 10, 30), (5, 5, 10)], {1: pytest.approx(0.75, abs=1e-3), 2: pytest.approx(0.25, abs=1e-3)}),
    ],
)
def test_tokens_are_spread_evenly_over_their_requests_time(
    intervals: list[tuple[float, float, float]], expected: dict[int, float]
) -> None:
    found = concurrency_histogram(*np.array(intervals, dtype=float).reshape(-1, 3).T)
    assert found == {
        b: share if not isinstance(share, float) else pytest.approx(share) for b, share in expected.items()
    }


intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 50)), min_size=1, max_size=12
).filter(lambda rows: any(tokens for _, _, tokens in rows))


def by_the_second(rows: list[tuple[int, int, int]]) -> dict[int, float]:
    """The same second by second: starts and lengths are whole seconds."""
    made: dict[int, float] = {}
    for second in range(61):
        running = [(length, tokens) for start, length, tokens in rows if start <= second < start + length]
        if running:
            made[len(running)] = made.get(len(running), 0.0) + sum(tokens / length for length, tokens in running)
    return {b: tokens / sum(made.values()) for b, tokens in made.items() if tokens}


@given(intervals, st.sampled_from([0.0, 1.8e9]))
def test_the_sweep_agrees_with_counting_every_second_also_late_in_the_epoch(
    rows: list[tuple[int, int, int]], epoch: float
) -> None:
    start, length, tokens = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    found = concurrency_histogram(start + epoch, start + length + epoch, tokens)
    expected = by_the_second(rows)
    assert {b: share for b, share in found.items() if share > 1e-9} == {
        b: pytest.approx(s) for b, s in expected.items()
    }
    assert sum(found.values()) == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e3), st.integers(0, 4000)), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_shares_sum_to_one_whatever_the_order_of_the_requests(
    rows: list[tuple[float, float, int]], shuffle: Any
) -> None:
    shuffled = list(rows)
    shuffle.shuffle(shuffled)
    found = [
        concurrency_histogram([s for s, _, _ in own], [s + d for s, d, _ in own], [t for _, _, t in own])
        for own in (rows, shuffled)
    ]
    assert found[0] == {b: pytest.approx(share, abs=1e-9) for b, share in found[1].items()}
    if any(tokens for _, _, tokens in rows):
        assert sum(found[0].values()) == pytest.approx(1.0)
        assert all(1 <= b <= len(rows) and share >= 0 for b, share in found[0].items())


def test_a_million_requests_take_seconds() -> None:
    rng = np.random.default_rng(0)
    start = np.sort(rng.uniform(0, 86_400, 1_000_000)) + 1.8e9
    began = time.perf_counter()
    found = concurrency_histogram(start, start + rng.exponential(2.0, len(start)), rng.integers(1, 400, len(start)))
    assert time.perf_counter() - began < 20
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(found, key=lambda b: found[b]) == pytest.approx(24, abs=6)  # arrivals a second times seconds, and itself


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (([0.0], [math.nan], [1]), "not finite"),
        (([math.inf], [math.inf], [1]), "not finite"),
        (([0.0, 5.0], [1.0, 4.0], [1, 1]), "request 1 .* clock"),
        (([0.0], [1.0], [-1]), "request 0"),
    ],
)
def test_times_that_cannot_be_are_an_error(columns: Any, says: str) -> None:
    with pytest.raises(EvaluationError, match=says):
        concurrency_histogram(*columns)


def test_the_load_of_a_service_has_its_mean_lengths_without_what_was_cached() -> None:
    rows = table(
        request("a", 0, 10, 60, prompt_tokens=100, cached_tokens=20),
        request("b", 5, 15, 60, prompt_tokens=40, cached_tokens=40),
    )
    assert service_load([rows]) == ServiceLoad({1: 0.5, 2: 0.5}, prompt_tokens=40, output_tokens=60, requests=2)


def test_requests_of_different_replicas_do_not_run_together() -> None:
    first, second = table(request("a", 0, 10, 30)), table(request("b", 0, 10, 90))
    assert service_load([first, second]).concurrency == {1: 1.0}
    assert service_load([pa.concat_tables([first, second])]).concurrency == {2: 1.0}


def test_replicas_weigh_by_their_tokens() -> None:
    pair = table(request("a", 0, 10, 30), request("b", 0, 10, 30))
    assert service_load([table(request("c", 0, 10, 180)), pair]).concurrency == {1: 0.75, 2: 0.25}


def test_the_profiles_own_requests_are_no_load() -> None:
    own = request("p", 0, 10, 500, slice=PROBE_SLICE)
    assert service_load([table(request("a", 0, 10, 30, slice="chat"), own, request("b", 20, 30, 30))]) == ServiceLoad(
        {1: 1.0}, prompt_tokens=0, output_tokens=30, requests=2
    )


def test_a_request_that_ended_before_it_began_is_left_out_and_counted() -> None:
    found = service_load([table(request("a", 0, 10, 30), request("b", 9, 8.5, 30))])
    assert (found.concurrency, found.requests, found.left_out) == ({1: 1.0}, 1, 1)


@pytest.mark.parametrize("tables", [[], [table()], [table(request("a", 0, 1, 0))]])
def test_without_tokens_there_is_no_load(tables: list[pa.Table]) -> None:
    assert service_load(tables).concurrency == {}
