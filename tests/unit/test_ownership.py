"""Whose a training process is: nothing without the run's mark is ever signalled, whatever its pid or folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tide import ownership
from tide.errors import BadInputError
from tide.ownership import Owner

SLEEP = "import time; print(1, flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
FAMILY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
{SLEEP}
"""


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_every_process_of_the_block_carries_the_mark_and_none_before_or_after(tmp_path: Path) -> None:
    with (
        started(SLEEP) as before,
        ownership.owned(tmp_path, "run-1") as owner,
        started(FAMILY) as inside,
    ):
        found = ownership.members(owner)
        assert inside.pid in found
        assert len(found) == 2, "the child that went into a session of its own is one of them"
        assert before.pid not in found
        assert os.getpid() not in found
        assert ownership.end_members(owner, grace_s=5) == 2
        assert inside.wait(5) < 0
        assert before.poll() is None
    assert ownership.MARK not in os.environ
    with started(SLEEP) as after:
        assert ownership.members(owner) == []
        assert after.poll() is None


def test_the_owner_file_says_which_flow_works_there_and_that_it_lives(tmp_path: Path) -> None:
    with ownership.owned(tmp_path, "run-1") as owner:
        assert ownership.read_owner(tmp_path) == owner
        assert (owner.flow_run, owner.pid) == ("run-1", os.getpid())
        assert ownership.flow_alive(owner)
        assert ownership.is_here(owner)
    assert not ownership.is_here(owner.model_copy(update={"host": "another"}))


def test_the_flow_run_is_the_one_whose_process_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ownership.FLOW_RUN, raising=False)
    with ownership.owned(tmp_path) as owner:
        assert owner.flow_run is None
    monkeypatch.setenv(ownership.FLOW_RUN, "8d1f")
    with ownership.owned(tmp_path) as owner:
        assert owner.flow_run == "8d1f"


def test_a_process_that_has_the_pid_of_a_dead_flow_is_not_the_flow(tmp_path: Path) -> None:
    with ownership.owned(tmp_path, None) as owner:
        for other in ({"start_ticks": owner.start_ticks - 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}):
            assert not ownership.flow_alive(owner.model_copy(update=other))


def test_what_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with ownership.owned(tmp_path, None) as owner, started(STUBBORN) as process:
        assert ownership.end_members(owner, grace_s=0.3) == 1
        assert process.wait(5) == -9


def test_after_a_reboot_nothing_is_a_member(tmp_path: Path) -> None:
    with ownership.owned(tmp_path, None) as owner, started(SLEEP):
        assert ownership.members(owner.model_copy(update={"boot_id": "another"})) == []


def test_a_folder_without_an_owner_has_none_and_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    assert ownership.read_owner(tmp_path) is None
    (tmp_path / ownership.FILE).write_text("{}")
    with pytest.raises(BadInputError, match="no owner file"):
        ownership.read_owner(tmp_path)


def test_an_owner_file_of_today_reads_back_to_the_byte(tmp_path: Path) -> None:
    with ownership.owned(tmp_path, "run-1") as owner:
        text = (tmp_path / ownership.FILE).read_text()
    assert Owner.model_validate_json(text).to_json() == text == owner.to_json()
