"""The command: help for everything, errors that say what to do, exit codes that scripts can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tide import cli

COMMANDS = (
    "init",
    "doctor",
    "up",
    "down",
    "status",
    "parts",
    "metrics",
    "env",
    "run",
    "serving",
    "history",
    "reproduce",
    "lineage",
    "rollback",
    "rollout",
    "reconcile",
    "demo",
    "erase",
    "profile",
    "preflight",
    "approvals",
    "approve",
    "refuse",
    "reviewer-key",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "--home" in result.output


def test_a_command_starts_without_torch() -> None:
    code = "import sys, tide.cli; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False", "seconds that every command would wait for"


def test_parts_of_a_home_without_a_stack_is_all_stopped(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["parts", "--json", "--home", str(tmp_path)])
    parts = json.loads(result.output)
    assert {p["name"] for p in parts} >= {"lakefs", "prefect", "sglang"}
    assert {p["state"] for p in parts} == {"stopped"}


def test_down_without_a_stack_is_harmless(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["down", "--home", str(tmp_path)])
    assert (result.exit_code, "nothing was running" in result.output) == (0, True)


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tide", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_an_error_is_one_line_with_the_next_step_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, "env", "--home", str(tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "tide up" in error


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "missing.jsonl"), ("", "empty"), ('{"messages": 1}\n', "line 1"), ("not json\n", "line 1")],
)
def test_a_bad_traffic_file_is_refused_before_anything_is_started(
    content: str | None,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "missing.jsonl"
    if content is not None:
        path = tmp_path / "traffic.jsonl"
        path.write_text(content)
    assert _main(monkeypatch, "demo", "--fast", "--home", str(tmp_path / "home"), "--after", str(path)) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "home" / "demo" / "run").exists()
