"""`tide preflight`: findings as a person and as a program read them, and an exit code for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.reports import TARGET
from tide import cli
from tide.cli import pools
from tide.config import Policy
from tide.errors import StoreUnavailable
from tide.trainer.base import Finding, Preflight


class Worker:
    """A trainer that answers with these findings, and a store that is down."""

    def __init__(self, *findings: Finding) -> None:
        self.findings, self.asked = findings, dict[str, Any]()

    def preflight(self, _config: object, **asked: Any) -> Preflight:
        self.asked = asked
        return Preflight(findings=self.findings)

    def head(self, *_: object) -> None:
        raise StoreUnavailable("lakeFS at http://127.0.0.1:1 does not answer")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    found = Worker(Finding(name="disk", state="wrong", detail="1 of 9 GB", fix="more scratch"))
    (tmp_path / "contract.json").write_text(TARGET.to_json())
    config = SimpleNamespace(policy=Policy, home=tmp_path, bundle=tmp_path, states_repository="s")
    monkeypatch.setattr(pools, "use_stack", lambda _home: config)
    monkeypatch.setattr(pools.wiring, "trainer", lambda: found)
    monkeypatch.setattr(pools.wiring, "store", lambda _config: found)
    return found


def test_a_finding_that_is_wrong_is_told_with_its_fix_and_exits_1(worker: Worker) -> None:
    result = CliRunner().invoke(cli.app, ["preflight"])
    assert result.exit_code == 1
    assert "wrong    disk           1 of 9 GB" in result.output
    assert "-> more scratch" in result.output


def test_without_a_store_the_bundle_is_looked_at_by_itself(worker: Worker) -> None:
    worker.findings = (Finding(name="disk", state="ok", detail="enough"),)
    result = CliRunner().invoke(cli.app, ["preflight", "--json", "--rehearse"])
    assert result.exit_code == 0
    states, disk = json.loads(result.output)
    assert (states["name"], states["state"]) == ("states", "unknown")
    assert "does not answer" in states["detail"]
    assert disk["state"] == "ok"
    assert worker.asked["target"] == TARGET
    assert worker.asked["tokens"] == Policy().train_tokens
    assert worker.asked["rehearse"] is True
