"""Rows of unfinished requests: addressed by position, bounded in bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide.sglang_plugin.store import RowStore

HIDDEN = 4
ROW_BYTES = 4 * HIDDEN * 4


def rows(positions: range, key: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that name their request and position."""
    values = torch.tensor([1000.0 * key + p for p in positions]).reshape(-1, 1)
    return values.expand(-1, 3 * HIDDEN).clone(), values.expand(-1, HIDDEN).clone()


def add(store: RowStore, key: int, positions: range, now: float = 0.0) -> bool:
    return store.add(key, positions.start, *rows(positions, key), now)


def found(store: RowStore, key: int, end: int) -> tuple[int, list[float]] | None:
    run = store.finish(key, end)
    return None if run is None else (run.first, run.last[:, 0].tolist())


def test_rows_come_back_in_order_of_position_whatever_order_they_came_in() -> None:
    store = RowStore(1 << 20)
    for part in (range(10, 20), range(0, 10), range(20, 23)):
        assert add(store, 1, part)
    assert found(store, 1, 23) == (0, [1000.0 + p for p in range(23)])
    assert (len(store), store.size) == (0, 0)


def test_a_row_computed_again_replaces_the_old_one() -> None:
    store = RowStore(1 << 20)
    add(store, 1, range(0, 8))
    store.add(1, 4, *rows(range(104, 106)), 0.0)
    run = store.finish(1, 8)
    assert run is not None
    assert run.aux[:, 0].tolist() == [1000, 1001, 1002, 1003, 104, 105, 1006, 1007]


def test_a_gap_leaves_the_longest_run_and_counts_the_rest() -> None:
    store = RowStore(1 << 20)
    add(store, 1, range(0, 5))
    add(store, 1, range(6, 20))
    run = store.finish(1, 20)
    assert run is not None
    assert (run.first, run.aux.shape[0], run.lost) == (6, 14, 5)


def test_rows_beyond_the_end_are_cut_off() -> None:
    store = RowStore(1 << 20)
    add(store, 1, range(3, 12))
    assert found(store, 1, 9) == (3, [1003.0 + p for p in range(6)])


def test_requests_never_see_each_other_s_rows() -> None:
    store = RowStore(1 << 20)
    for position in range(0, 30, 3):
        for key in (1, 2, 3):
            add(store, key, range(position, position + 3))
    assert [found(store, key, 30) for key in (3, 1, 2)] == [
        (0, [1000.0 * key + p for p in range(30)]) for key in (3, 1, 2)
    ]


def test_what_does_not_fit_is_refused_and_what_is_held_stays() -> None:
    store = RowStore(64 * ROW_BYTES)
    assert add(store, 1, range(0, 64))
    assert not add(store, 2, range(0, 1))
    assert not add(store, 1, range(64, 65))
    assert store.size <= 64 * ROW_BYTES
    assert found(store, 1, 64) == (0, [1000.0 + p for p in range(64)])
    assert add(store, 2, range(0, 1))


def test_idle_requests_are_evicted_and_their_rows_counted() -> None:
    store = RowStore(1 << 20)
    add(store, 1, range(0, 5), now=10.0)
    add(store, 2, range(0, 7), now=20.0)
    assert store.evict_idle(before=15.0) == {1: 5}
    assert store.clear() == 7
    assert store.size == 0


def test_an_unknown_request_has_no_run() -> None:
    assert RowStore(1 << 20).finish(9, 10) is None


def test_rows_of_unequal_length_are_an_error() -> None:
    aux, last = rows(range(4))
    with pytest.raises(ValueError, match="do not fit"):
        RowStore(1 << 20).add(1, 0, aux, last[:3], 0.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=25), st.integers(1, 70))
def test_any_arrival_order_gives_the_longest_run_below_the_end(parts: list[tuple[int, int]], end: int) -> None:
    store, have = RowStore(1 << 20), set[int]()
    for start, count in parts:
        add(store, 1, range(start, start + count))
        have |= set(range(start, start + count))
    runs = [
        (high - low, low)
        for low in range(end)
        for high in range(low + 1, end + 1)
        if all(p in have for p in range(low, high))
    ]
    run = store.finish(1, end)
    if not runs:
        assert run is None
        return
    length, _ = max(runs)
    assert run is not None
    assert run.aux.shape[0] == length
    assert run.last[:, 0].tolist() == [1000.0 + run.first + i for i in range(length)]
    assert run.lost == len(have) - length
