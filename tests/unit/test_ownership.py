"""Whose a training process is: nothing without the run's mark is ever signalled, whatever its pid or folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tide.errors import BadInputError
from tide.recovery import ownership
from tide.recovery.ownership import Owner

SLEEP = "import time; print(1, flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
FAMILY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
{SLEEP}
"""


@contextmanager
def started(code: str, owner: Owner | None = None) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, ownership.MARK: owner.token} if owner else None
    with subprocess.Popen([sys.executable, "-S", "-c", code], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_every_process_that_came_of_the_mark_is_a_member_and_no_other(tmp_path: Path) -> None:
    one, two = ownership.claim(tmp_path / "1", "run-1"), ownership.claim(tmp_path / "2", "run-2")
    with started(SLEEP) as other, started(FAMILY, one) as inside, started(SLEEP, two) as second:
        found = ownership.members(one)
        assert inside.pid in found
        assert len(found) == 2, "the child that went into a session of its own is one of them"
        assert not {other.pid, second.pid, os.getpid()} & set(found)
        assert ownership.end_members(one, grace_s=5) == 2
        assert inside.wait(5) < 0
        assert other.poll() is second.poll() is None


def test_the_owner_file_says_which_flow_works_there_and_that_it_lives(tmp_path: Path) -> None:
    owner = ownership.claim(tmp_path, "run-1")
    assert ownership.read_owner(tmp_path) == owner
    assert (owner.flow_run, owner.pid) == ("run-1", os.getpid())
    assert ownership.flow_alive(owner)
    assert ownership.is_here(owner)
    assert not ownership.is_here(owner.model_copy(update={"host": "another"}))


def test_the_flow_run_is_the_one_whose_process_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ownership.FLOW_RUN, raising=False)
    assert ownership.claim(tmp_path).flow_run is None
    monkeypatch.setenv(ownership.FLOW_RUN, "8d1f")
    assert ownership.claim(tmp_path).flow_run == "8d1f"


def test_a_process_that_has_the_pid_of_a_dead_flow_is_not_the_flow(tmp_path: Path) -> None:
    owner = ownership.claim(tmp_path)
    for other in ({"start_ticks": owner.start_ticks - 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}):
        assert not ownership.flow_alive(owner.model_copy(update=other))


def test_what_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    owner = ownership.claim(tmp_path)
    with started(STUBBORN, owner) as process:
        assert ownership.end_members(owner, grace_s=0.3) == 1
        assert process.wait(5) == -9


def test_after_a_reboot_nothing_is_a_member(tmp_path: Path) -> None:
    owner = ownership.claim(tmp_path)
    with started(SLEEP, owner):
        assert ownership.members(owner.model_copy(update={"boot_id": "another"})) == []


def test_a_folder_without_an_owner_has_none_and_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    assert ownership.read_owner(tmp_path) is None
    (tmp_path / ownership.FILE).write_text("{}")
    with pytest.raises(BadInputError, match="no owner file"):
        ownership.read_owner(tmp_path)


def test_an_owner_file_of_today_reads_back_to_the_byte(tmp_path: Path) -> None:
    owner = ownership.claim(tmp_path, "run-1")
    text = (tmp_path / ownership.FILE).read_text()
    assert Owner.model_validate_json(text).to_json() == text == owner.to_json()
