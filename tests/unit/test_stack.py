"""How a stack is found again, kept from two commands at once, watched, and how its engine is told what it needs."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from infra import local, processes, stack, start
from infra.sglang import SglangOptions
from tide.errors import ConfigError, ServiceError


def test_two_commands_do_not_start_or_stop_one_home_at_once(tmp_path: Path) -> None:
    with (
        stack.exclusive(tmp_path),
        pytest.raises(ServiceError, match="another command starts or stops the stack"),
        stack.exclusive(tmp_path, wait_s=0.2),
    ):
        pass


def test_a_stack_is_found_again_by_private_files_and_forgotten_with_its_keys(tmp_path: Path) -> None:
    options = SglangOptions(model=tmp_path / "m", port=1, draft=tmp_path / "d", admin_key="k'ey $1")
    env = {"TIDE_ADMIN_KEY": "k'ey $1", "TIDE_LAKEFS_ENDPOINT": "http://a", "PREFECT_API_URL": "http://b/api"}
    saved = stack.Stack(tmp_path, env, options)
    stack.save(saved)
    assert stack.load(tmp_path) == saved
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()} == {0o600}
    stack.forget(tmp_path)
    assert stack.read_env(tmp_path) == {}
    with pytest.raises(ServiceError, match="no stack is known"):
        stack.load(tmp_path)


def test_a_lakefs_that_somebody_else_runs_is_shown_as_such_and_not_waited_for(tmp_path: Path) -> None:
    options = SglangOptions(model=tmp_path / "m", port=1, draft=tmp_path / "d")
    env = {"TIDE_LAKEFS_ENDPOINT": "http://lakefs.example:8000", "PREFECT_API_URL": "http://b/api"}
    stack.save(stack.Stack(tmp_path, env, options))
    found = {part.name: part for part in local.status(tmp_path)}
    assert (found["lakefs"].state, found["lakefs"].url) == ("external", "http://lakefs.example:8000")
    assert found["prefect"].state == "stopped"
    local.watch(tmp_path, poll_s=0.01)
    stack.forget(tmp_path)
    assert local.status(tmp_path)[0].state == "stopped"


def test_the_admin_key_is_never_on_the_command_line(tmp_path: Path) -> None:
    options = SglangOptions(model=tmp_path, port=1, draft=tmp_path, admin_key="hidden")
    assert not any("hidden" in word for word in options.argv(tmp_path / "secrets.yaml"))
    assert "hidden" not in repr(options)


def test_the_engine_inherits_no_setting_of_the_control_plane(tmp_path: Path) -> None:
    options = SglangOptions(model=tmp_path, port=1, speculative=False)
    env = options.env({"TIDE_DRAFT_DIR": "/elsewhere", "PREFECT__FLOW_RUN_ID": "1", "HOME": "/root", "NO_PROXY": "a"})
    assert not any(name.startswith(("TIDE_", "PREFECT")) for name in env)
    assert env["HOME"] == "/root"
    assert env["NO_PROXY"] == "a,127.0.0.1,localhost"


def test_watching_ends_well_with_a_stop_and_badly_with_a_death(tmp_path: Path) -> None:
    part = processes.start(tmp_path, "prefect", [sys.executable, "-S", "-c", "print('disk full')"])
    part.wait_exit(10)
    with pytest.raises(ServiceError, match="prefect died:\ndisk full"):
        local.watch(tmp_path, poll_s=0.01)
    part.stop()
    local.watch(tmp_path, poll_s=0.01)


def test_a_missing_draft_leaves_the_engine_alone(tmp_path: Path) -> None:
    options = SglangOptions(model=tmp_path, port=1, speculative=False)
    stack.save(stack.Stack(tmp_path, {"TIDE_LAKEFS_ENDPOINT": "", "PREFECT_API_URL": ""}, options))
    (tmp_path / "config.json").touch()
    engine = processes.start(tmp_path, "sglang", [sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(ConfigError, match=r"draft model .*absent has no config\.json"):
            local.restart_engine(tmp_path, tmp_path / "absent")
        assert engine.alive
    finally:
        engine.stop()
    assert stack.load(tmp_path).engine == options


def test_the_draft_that_was_promoted_last_serves_first(tmp_path: Path) -> None:
    digest = "a" * 64
    assert start.marked_draft(tmp_path) is None
    (tmp_path / "serving").write_text(f"{digest}\n")
    with pytest.raises(ServiceError, match=r"names draft 'a+', which is not in"):
        start.marked_draft(tmp_path)
    (tmp_path / digest).mkdir()
    (tmp_path / digest / "config.json").touch()
    assert start.marked_draft(tmp_path) == tmp_path / digest


def test_a_home_keeps_the_name_of_its_service(tmp_path: Path) -> None:
    def name(service: str | None) -> str:
        return start.Start(tmp_path, start.Wanted(service=service), print, foreground=False)._service()

    assert name(None) == "smollm2"
    assert name("support-chat") == "support-chat"
    assert name(None) == "support-chat"
