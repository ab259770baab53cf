"""The ledger is read as it grows: once each record, in bounded looks, and nothing is missed or counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from tests.fakes.memory_store import MemoryStore
from tests.support.signed import verdict_on
from tide.domain import DriftReport, Promotion
from tide.lineage import ledger, ledger_tail
from tide.lineage.ledger_tail import LedgerTail
from tide.store.base import ObjectInfo

DRAFTS = "svc-drafts"
DAY = 86_400.0


class CountingStore(MemoryStore):
    """Counts what a look costs."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.listed = 0, 0

    @override
    def read(self, repository: str, ref: str, path: str) -> bytes:
        self.reads += 1
        return super().read(repository, ref, path)

    @override
    def list(self, repository: str, ref: str, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in super().list(repository, ref, prefix):
            self.listed += 1
            yield item


def drift(decision: str = "none", cause: str | None = None, **figures: float) -> DriftReport:
    return DriftReport.model_validate(
        {
            "decision": decision,
            "cause": cause,
            "reasons": ("r",),
            "figures": figures,
            "incumbent": "d",
            "states_commit": "s",
        }
    )


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


def test_without_a_ledger_there_is_nothing_and_that_is_complete(store: CountingStore) -> None:
    tail = LedgerTail(store, DRAFTS)
    assert not tail.complete, "not looked yet"
    tail.look()
    assert (tail.complete, tail.counts, tail.newest) == (True, {}, {})
    assert ledger_tail.newest(store, DRAFTS) == {}


def test_records_are_counted_by_kind_and_by_what_they_decided(store: CountingStore) -> None:
    for record in (drift(), drift("watch"), drift()):
        ledger.append(store, DRAFTS, "drift", record)
    ledger.append(store, DRAFTS, "verdict", verdict_on("a" * 64, outcome="reject"), attachments={".html": b""})
    ledger.append(store, DRAFTS, "approval", drift())
    tail = LedgerTail(store, DRAFTS)
    tail.look()
    assert (tail.counts["drift", "none"], tail.counts["drift", "watch"], tail.counts["drift", "retrain"]) == (2, 1, 0)
    assert (tail.counts["verdict", "reject"], tail.counts["*", "approval"], tail.counts["*", "verdict"]) == (1, 1, 1)
    assert tail.newest["drift"][1] == drift()


def test_a_look_reads_only_what_is_new_and_an_idle_one_nothing(store: CountingStore) -> None:
    for _ in range(5):
        ledger.append(store, DRAFTS, "drift", drift())
    tail = LedgerTail(store, DRAFTS)
    tail.look()
    store.reads = store.listed = 0
    tail.look()
    assert (store.reads, store.listed) == (0, 0)
    ledger.append(store, DRAFTS, "drift", drift("retrain", "headroom"))
    tail.look()
    assert (store.reads, tail.counts["drift", "retrain"], tail.counts["drift", "none"]) == (1, 1, 5)


def test_a_look_lists_the_last_days_and_not_the_years_before(store: CountingStore) -> None:
    now = time.time()
    for age in (400, 300, 200, 0):
        ledger.append(store, DRAFTS, "drift", drift(), at=now - age * DAY)
    tail = LedgerTail(store, DRAFTS)
    tail.look()
    store.listed = 0
    ledger.append(store, DRAFTS, "drift", drift("watch"), at=now + 1)
    tail.look()
    assert (store.listed, tail.counts["*", "drift"]) == (2, 5)


def test_a_record_of_a_host_whose_clock_is_behind_is_not_missed(store: CountingStore) -> None:
    now = time.time()
    ledger.append(store, DRAFTS, "drift", drift(), at=now)
    tail = LedgerTail(store, DRAFTS)
    tail.look()
    ledger.append(store, DRAFTS, "drift", drift("watch"), at=now - 3600)
    tail.look()
    assert (tail.counts["drift", "watch"], tail.newest["drift"][1]) == (1, drift()), "counted, and not the newest"


def test_a_long_ledger_is_caught_up_over_several_looks(store: CountingStore) -> None:
    for _ in range(7):
        ledger.append(store, DRAFTS, "drift", drift())
    tail, states = LedgerTail(store, DRAFTS, reads=3), []
    for _ in range(3):
        tail.look()
        states.append((tail.complete, tail.unread, tail.counts["*", "drift"]))
    assert states == [(False, 4, 3), (False, 1, 6), (True, 0, 7)]


def test_a_record_of_another_version_is_counted_as_unreadable_and_hides_no_other(store: CountingStore) -> None:
    ledger.append(store, DRAFTS, "drift", drift())
    store.put(DRAFTS, ledger.BRANCH, "ledger/20991231T000000000000Z-drift-00000000.json", b'{"schema_version": 9}')
    store.put(DRAFTS, ledger.BRANCH, "ledger/no-stamp-at-all.json", b"{}")
    store.commit(DRAFTS, ledger.BRANCH, "later", {})
    tail = LedgerTail(store, DRAFTS)
    tail.look()
    assert (tail.unreadable, tail.counts["drift", "none"], tail.counts["*", "drift"]) == (1, 1, 2)


def test_a_drift_retrain_counts_once_by_its_last_word() -> None:
    asked = drift("retrain", "drift")
    assert ledger_tail.counted_as(asked) == "", "the engine is asked next, and its word is written too"
    assert ledger_tail.counted_as(drift("retrain", "drift", engine_requests=30.0)) == "retrain"
    assert ledger_tail.counted_as(drift("watch", "engine", engine_requests=30.0)) == "watch"
    assert ledger_tail.counted_as(drift("retrain", "bootstrap")) == "retrain"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(1, 4))
def test_however_looks_and_records_interleave_the_counts_are_those_of_one_look(plan: list[int], reads: int) -> None:
    """0: a look; 1..3: a record, up to two days old."""
    store, now = MemoryStore(), time.time()
    tail = LedgerTail(store, DRAFTS, reads=reads)
    for step, what in enumerate(plan):
        if what == 0:
            tail.look()
        else:
            record = Promotion(
                kind="promotion", generation=step, draft="a" * 64, previous=None, verdict=None, replicas=(), at=1.0
            )
            kind, content = [("drift", drift()), ("promotion", record), ("other", drift("watch"))][what - 1]
            ledger.append(store, DRAFTS, kind, content, at=now - 600 * (step % 3) + step)
    for _ in range(len(plan) + 1):
        tail.look()
    once = LedgerTail(store, DRAFTS)
    once.look()
    assert (tail.complete, tail.counts, tail.newest) == (True, once.counts, once.newest)
