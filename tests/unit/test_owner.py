"""Who works in a run's folder: told from a process that has gone, or whose number another one has now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tide.trainer.owner import FILE, FLOW_RUN, Owner, alive, owned, read, start_ticks


def test_a_folder_is_owned_while_the_work_lasts_whatever_ends_it(tmp_path: Path) -> None:
    def work() -> None:
        with owned(tmp_path) as owner:
            assert read(tmp_path) == owner
            assert alive(owner)
            assert owner.pid == os.getpid()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert read(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_flow_run_is_named_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLOW_RUN, raising=False)
    with owned(tmp_path) as owner:
        assert owner.flow_run == ""
    monkeypatch.setenv(FLOW_RUN, "8d1f")
    with owned(tmp_path) as owner:
        assert owner.flow_run == "8d1f"


def test_a_process_that_has_ended_owns_nothing_any_more() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        owner = Owner(pid=process.pid, start_ticks=ticks, started_at=0.0)
        assert alive(owner)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not alive(owner), "a zombie owns nothing"
    assert not alive(owner)


def test_another_process_under_the_same_number_is_not_the_owner() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert not alive(Owner(pid=os.getpid(), start_ticks=ticks - 1, started_at=0.0))


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}', '{"pid": 1, "start_ticks": 2, "started_at": 3, "x": 4}'])
def test_a_file_that_is_no_such_record_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert read(tmp_path) is None
