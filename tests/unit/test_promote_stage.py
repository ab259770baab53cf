"""The rollout as a task: what it shows and records of a promotion, a refusal and a lost race."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tasks import promote as task
from tests.fakes.fake_engine import FakeEngine
from tests.support.signed import AUTHORITY, KEY, put_verdict, verdict_on
from tests.unit.test_rollout import REPOSITORY, A, B, store_with
from tests.unit.test_trial import GOOD, PATIENT, WORSE, Seen
from tide import wiring
from tide.canary import lease as canary_lease
from tide.config import Settings
from tide.domain import CanaryLease, CanaryRefusal, CanaryReport, Promotion
from tide.errors import CanaryBusy
from tide.lineage import ledger
from tide.serving.rollout import Site, read_serving


class Shown:
    """The task with these parts, and what it showed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, report: CanaryReport) -> None:
        self.store = store_with(A, B)
        self.engines = [FakeEngine("r0"), FakeEngine("r1")]
        put_verdict(self.store, REPOSITORY, "candidate-aaaaaa", verdict_on(A))
        site = Site(self.store, REPOSITORY, self.engines, folder, policy=PATIENT, watch=Seen(report))
        self.pages: list[str] = []
        self.warnings: list[str] = []
        config = Settings(service="svc", _env_file=None)  # type: ignore[call-arg]
        for name, value in {
            "settings": config,
            "site": site,
            "authority": AUTHORITY,
            "store": self.store,
            "signing_key": KEY,
        }.items():
            monkeypatch.setattr(wiring, name, lambda *_, value=value: value)
        monkeypatch.setattr(task, "create_markdown_artifact", lambda **made: self.pages.append(made["markdown"]))
        monkeypatch.setattr(task, "get_run_logger", lambda: self)

    def warning(self, text: str, *values: Any) -> None:
        """As a logger's."""
        self.warnings.append(text % values)

    info = warning


def test_a_promotion_is_in_the_ledger_and_its_page_has_the_canary_and_who_is_out_of_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = Shown(monkeypatch, tmp_path, GOOD)
    shown.engines[1].healthy = False
    promotion = task.roll_out.fn("candidate-aaaaaa", A, 0)
    assert ledger.newest(shown.store, REPOSITORY, "promotion", Promotion) == promotion
    assert "no regression in 100 requests" in shown.pages[0]
    assert "r1: OUT OF SERVICE" in shown.pages[0]
    assert "r1: OUT OF SERVICE" in shown.warnings[0]


def test_a_refusal_is_a_normal_value_and_is_shown_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = Shown(monkeypatch, tmp_path, WORSE)
    refusal = task.roll_out.fn("candidate-aaaaaa", A, 0)
    assert isinstance(refusal, CanaryRefusal)
    assert ledger.every(shown.store, REPOSITORY, "canary", CanaryRefusal) == [refusal]
    assert ledger.every(shown.store, REPOSITORY, "promotion", Promotion) == []
    assert "refused by the canary (regression)" in shown.pages[0]
    assert "below the incumbent" in shown.pages[0]


def test_a_stale_verdict_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = Shown(monkeypatch, tmp_path, GOOD)
    assert task.roll_out.fn("candidate-aaaaaa", A, 7) is None
    assert "not promoted" in shown.warnings[0]


def test_while_another_candidate_is_on_trial_the_promotion_waits_and_its_verdict_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = Shown(monkeypatch, tmp_path, GOOD)
    before = read_serving(shown.store, REPOSITORY)
    lease = CanaryLease(draft=B, verdict="b" * 64, replicas=("r0",), run="elsewhere/1/1", lease_until=time.time() + 900)
    held = canary_lease.take(shown.store, REPOSITORY, before, lease, KEY.sign("attestation", verdict_on(B)))
    waits: list[float] = []

    def other_ends(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            canary_lease.release(shown.store, REPOSITORY, held, WORSE)

    monkeypatch.setattr(task.time, "sleep", other_ends)
    assert isinstance(task.roll_out.fn("candidate-aaaaaa", A, 0), Promotion)
    assert waits == [task.BUSY_S] * 2
    assert [text for text in shown.warnings if "is on trial on r0 by elsewhere/1/1" in text] == shown.warnings
    assert len(shown.warnings) == 1


def test_a_lease_that_was_taken_after_the_look_at_serving_is_waited_for_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Shown(monkeypatch, tmp_path, GOOD).store
    before = read_serving(store, REPOSITORY)
    statement = KEY.sign("attestation", verdict_on(B))
    one, two = (
        CanaryLease(draft=draft, verdict="b" * 64, replicas=("r0",), run="elsewhere/1/1", lease_until=time.time() + 900)
        for draft in (B, A)
    )
    canary_lease.take(store, REPOSITORY, before, one, statement)
    with pytest.raises(CanaryBusy, match="went on trial first"):
        canary_lease.take(store, REPOSITORY, before, two, statement)
