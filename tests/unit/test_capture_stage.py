"""The stage that sets the capture rate: every replica gets it, and one that is gone is named and stops nothing."""

from __future__ import annotations

import logging

import pytest

from tasks import capture as module
from tests.fakes.fake_engine import FakeEngine
from tide.domain import DriftReport

REPORT = DriftReport(
    decision="watch", reasons=("a reason",), figures={"capture_rate": 0.25}, incumbent="none", states_commit="5" * 64
)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    found = [FakeEngine("r0"), FakeEngine("r1"), FakeEngine("r2")]
    monkeypatch.setattr(module.wiring, "engines", lambda _config: found)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("stage"))
    return found


def test_every_replica_gets_the_rate_that_the_report_asks_for(replicas: list[FakeEngine]) -> None:
    module.set_capture_rate.fn(REPORT)
    assert [replica.capture_rates for replica in replicas] == [[0.25]] * 3


def test_a_replica_that_is_gone_is_named_and_the_others_get_theirs(
    replicas: list[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    replicas[1].healthy = False
    with caplog.at_level(logging.INFO):
        module.set_capture_rate.fn(REPORT)
    assert [replica.capture_rates for replica in replicas] == [[0.25], [], [0.25]]
    assert "capture rate not set: r1: not healthy" in caplog.text


def test_a_report_that_asks_for_no_rate_changes_none(replicas: list[FakeEngine]) -> None:
    module.set_capture_rate.fn(REPORT.model_copy(update={"figures": {}}))
    assert [replica.capture_rates for replica in replicas] == [[], [], []]
