from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.memory_store import MemoryStore
from tide.domain import DriftReport
from tide.lineage import ledger
from tide.store.base import ObjectInfo

REPORT = DriftReport(decision="none", reasons=("stable",), figures={}, incumbent="d", states_commit="s")


def test_an_attachment_that_is_json_too_is_no_record() -> None:
    """Evidently's figures stand beside the report they belong to, and are never read for one."""
    store = MemoryStore()
    attachments = {".html": b"<html>", ".evidently.json": b"{}"}
    path = ledger.append(store, "drafts", "drift", REPORT, attachments=attachments, at=1.0)
    assert ledger.newest(store, "drafts", "drift", DriftReport) == REPORT
    assert ledger.every(store, "drafts", "drift", DriftReport) == [REPORT]
    beside = path.removesuffix(".json") + ".evidently.json"
    assert store.read("drafts", ledger.BRANCH, beside) == b"{}"


def test_without_a_ledger_there_are_no_records() -> None:
    store = MemoryStore()
    assert ledger.newest(store, "drafts", "drift", DriftReport) is None
    assert ledger.every(store, "drafts", "drift", DriftReport) == []


def test_a_record_that_another_writers_commit_took_along_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    ledger.append(store, "drafts", "drift", REPORT, at=1.0)
    put = store.put

    def put_and_somebody_commits(*arguments: Any, **options: Any) -> ObjectInfo:
        done = put(*arguments, **options)
        store.commit("drafts", ledger.BRANCH, "of another writer", {})
        return done

    monkeypatch.setattr(store, "put", put_and_somebody_commits)
    ledger.append(store, "drafts", "drift", REPORT, at=2.0)
    assert ledger.every(store, "drafts", "drift", DriftReport) == [REPORT, REPORT]
