"""The train flow: a worker that is unfit is refused before any states are loaded, by a TrainingError that says why."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import train as module
from tasks import train as stages
from tests.support.reports import TARGET
from tide.config import Policy
from tide.domain import Snapshot
from tide.errors import TrainingError
from tide.trainer.base import Finding, Preflight

SNAPSHOT = Snapshot(
    repository="r", commit="c" * 64, target=TARGET, windows=(), shards=1, requests=1, rows=5_000_000, drafts=()
)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages as they are called; none does anything."""
    called: list[str] = []

    def stage(name: str) -> Any:
        def call(*_: object) -> str:
            called.append(name)
            return name

        return call

    names = ("pin_snapshot", "fetch_parent", "preflight", "fetch_training_shards", "verify_parent", "train_draft")
    for name in (*names, "select_checkpoint", "publish_candidate"):
        monkeypatch.setattr(module, name, stage(name))
    monkeypatch.setattr(module, "find_candidate", lambda _: None)
    return called


def test_the_worker_is_looked_at_before_states_are_loaded(order: list[str]) -> None:
    module.train.fn("candidate-x")
    assert order.index("preflight") < order.index("fetch_training_shards") < order.index("train_draft")


def test_an_unfit_worker_loads_nothing(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TrainingError("this worker cannot train: memory")

    monkeypatch.setattr(module, "preflight", refuse)
    with pytest.raises(TrainingError, match="memory"):
        module.train.fn("candidate-x")
    assert order == ["pin_snapshot", "fetch_parent"]


def test_a_candidate_that_is_there_is_not_trained_again(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_candidate", lambda branch: f"the candidate of {branch}")
    assert module.train.fn("candidate-x") == "the candidate of candidate-x"
    assert order == []


class Worker:
    """A trainer that only answers what it was asked about the worker."""

    def __init__(self, *findings: Finding) -> None:
        self.findings, self.asked = findings, dict[str, Any]()

    def preflight(self, _config: object, **asked: Any) -> Preflight:
        self.asked = asked
        return Preflight(findings=self.findings)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    found = Worker(Finding(name="disk", state="ok", detail="enough"))
    config = SimpleNamespace(policy=Policy, home=tmp_path, bundle=tmp_path / "bundle")
    monkeypatch.setattr(stages, "wiring", SimpleNamespace(settings=lambda: config, trainer=lambda: found))
    monkeypatch.setattr(stages, "get_run_logger", lambda: logging.getLogger("test"))
    return found


def test_the_stage_asks_for_the_rows_that_policy_trains_on(worker: Worker, tmp_path: Path) -> None:
    stages.preflight.fn(SNAPSHOT, None)
    assert worker.asked["tokens"] == Policy().train_tokens
    assert worker.asked["target"] == TARGET
    assert worker.asked["workdir"] == tmp_path / "train"


def test_what_is_wrong_refuses_by_name_and_what_is_unknown_is_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.findings = (
        Finding(name="driver", state="unknown", detail="no tool", fix="install it"),
        Finding(name="memory", state="wrong", detail="81 of 64 GB", fix="use flex_attention"),
        Finding(name="disk", state="wrong", detail="1 of 9 GB"),
    )
    told = r"cannot train: memory: 81 of 64 GB \(use flex_attention\); disk: 1 of 9 GB"
    with pytest.raises(TrainingError, match=told):
        stages.preflight.fn(SNAPSHOT, None)
    assert "driver: no tool. install it" in caplog.text
    worker.findings = worker.findings[:1]
    stages.preflight.fn(SNAPSHOT, None)
