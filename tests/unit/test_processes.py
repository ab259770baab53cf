"""Processes are started, waited for and ended by identity; every part here is a real, tiny process."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra import ports, processes
from infra.files import tail, write_private
from infra.identity import members
from tide.errors import ServiceError

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = "import subprocess, sys; subprocess.Popen({child}, start_new_session={new}, env={env}); {then}"

Start = Callable[..., processes.ManagedProcess]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    processes.stop_all(tmp_path, grace_s=0.1)


@pytest.fixture
def start(home: Path) -> Start:
    def begin(name: str, code: str, **options: object) -> processes.ManagedProcess:
        process = processes.start(home, name, [sys.executable, "-S", "-c", code], **options)  # type: ignore[arg-type]
        if "'up'" in code:
            process.wait_ready(lambda: "up" in process.log_tail(), 10, poll_s=0.01)
        return process

    return begin


def wait_until(check: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.01)
    return check()


def spawning(
    *,
    new_session: bool = False,
    env: dict[str, str] | None = None,
    then: str = "print('up', flush=True); time.sleep(60)",
) -> str:
    child = f"[sys.executable, '-S', '-c', {SLEEP!r}]"
    return "import time; " + PARENT.format(child=child, new=new_session, env=env, then=then)


def test_a_started_process_leads_a_session_of_its_own_and_ends_when_told(start: Start, home: Path) -> None:
    process = start("one", SLEEP)
    assert process.alive
    assert os.getsid(process.record.pid) == process.record.pid != os.getsid(0)
    process.stop()
    assert process.exit_code == -signal.SIGTERM
    assert not psutil.pid_exists(process.record.pid)
    assert processes.find(home, "one") is None


def test_stopping_twice_is_harmless(start: Start) -> None:
    process = start("one", SLEEP)
    process.stop()
    process.stop()


def test_the_record_and_the_log_are_private(start: Start, home: Path) -> None:
    process = start("one", SLEEP)
    for path in (processes.record_path(home, "one"), process.record.log):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_session_finds_the_process_by_its_record_and_ends_it(start: Start, home: Path) -> None:
    process = start("one", SLEEP)
    found = processes.find(home, "one")
    assert found is not None
    assert found.child is None
    assert found.alive
    found.stop()
    assert wait_until(lambda: not process.alive)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    process = start("one", STUBBORN)
    began = time.monotonic()
    process.stop(grace_s=0.3)
    assert process.exit_code == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 3


@pytest.mark.parametrize(
    "child",
    [{"new_session": False}, {"new_session": True}, {"env": {}}],
    ids=["same session", "own session", "no token"],
)
def test_children_end_with_it_whatever_session_they_moved_to(start: Start, child: dict[str, Any]) -> None:
    process = start("one", spawning(**child))
    assert wait_until(lambda: len(members(process.record)) == 2)
    children = psutil.Process(process.record.pid).children()
    process.stop()
    assert len(children) == 1
    assert wait_until(lambda: not children[0].is_running())


def test_children_that_outlived_the_leader_are_found_and_block_a_second_start(start: Start, home: Path) -> None:
    process = start("one", spawning(then="time.sleep(0.3)"))
    assert wait_until(lambda: process.exit_code == 0)
    with pytest.raises(ServiceError, match="one runs already as process"):
        start("one", SLEEP)
    orphans = members(process.record)
    assert len(orphans) == 1
    processes.stop_all(home)
    assert wait_until(lambda: not orphans[0].is_running())


def test_a_pid_given_anew_to_a_stranger_is_not_ended(start: Start, home: Path) -> None:
    process = start("one", SLEEP)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SLEEP], stdout=subprocess.DEVNULL, start_new_session=True
    ) as other:
        forged = process.record.model_copy(update={"pid": other.pid, "name": "forged"})
        write_private(processes.record_path(home, "forged"), forged.model_dump_json())
        process.stop()
        assert processes.stop_all(home) == []
        assert other.poll() is None
        assert processes.find(home, "forged") is None
        other.kill()


def test_the_session_of_a_stranger_under_a_recycled_pid_is_not_ended(start: Start) -> None:
    stranger = start("one", spawning(env={}))
    assert wait_until(lambda: len(members(stranger.record)) == 2)
    recycled = stranger.record.model_copy(update={"start_ticks": stranger.record.start_ticks - 1, "token": "0" * 32})
    assert members(recycled) == []


def test_a_process_of_the_same_pid_and_time_but_another_command_is_not_ended(start: Start) -> None:
    process = start("one", SLEEP)
    other = process.record.model_copy(update={"argv": ("postgres",), "token": "0" * 32})
    assert members(other) == []
    assert members(process.record) != []


def test_a_record_of_an_earlier_boot_ends_nothing(start: Start) -> None:
    process = start("one", SLEEP)
    assert members(process.record.model_copy(update={"boot_id": "another"})) == []


def test_a_damaged_record_is_named_and_nothing_is_ended_on_a_guess(home: Path) -> None:
    write_private(processes.record_path(home, "one"), '{"pid": 1}')
    with pytest.raises(ServiceError, match=r"one\.process\.json is damaged"):
        processes.stop_all(home)
    processes.record_path(home, "one").unlink()


def test_stop_all_keeps_the_given_order_then_ends_the_youngest_first(start: Start, home: Path) -> None:
    for name in ("server", "oldest", "youngest", "worker"):
        start(name, SLEEP)
    assert processes.stop_all(home, order=("worker",)) == ["worker", "youngest", "oldest", "server"]
    assert processes.stop_all(home) == []


def test_a_process_that_dies_before_it_is_ready_is_reported_with_its_last_words(start: Start) -> None:
    process = start("one", "import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(ServiceError, match=r"one ended with code 3 before it was ready;.*\nno such model"):
        process.wait_ready(lambda: False, timeout_s=10)


def test_a_process_that_is_never_ready_is_reported_in_time(start: Start) -> None:
    process = start("one", SLEEP)
    with pytest.raises(ServiceError, match=r"one was not ready within 0 s;.*\nup"):
        process.wait_ready(lambda: False, timeout_s=0.2, poll_s=0.02)


def test_work_is_waited_for_to_its_end_and_a_failure_shows_its_last_words(start: Start) -> None:
    assert start("good", "print('done')").wait_exit(10) < 10
    with pytest.raises(ServiceError, match=r"bad ended with code 4; .*\ndisk full"):
        start("bad", "import sys; print('disk full'); sys.exit(4)").wait_exit(10)
    with pytest.raises(ServiceError, match="slow was not ready within 0 s"):
        start("slow", SLEEP).wait_exit(0.2)


def test_progress_is_reported_with_the_last_line_of_the_log(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROGRESS_S", 0.05)
    lines: list[str] = []
    process = start("one", SLEEP)
    process.wait_ready(lambda: len(lines) >= 2, 10, lines.append, poll_s=0.02)
    assert lines[0] == "one: 0 s of at most 10 s; up"


def test_a_process_knows_the_ports_it_listens_on_from_those_of_others(start: Start) -> None:
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('up', flush=True); time.sleep(60)"
    )
    port = ports.free_port()
    process, stranger = start("one", code.format(port=port)), start("two", SLEEP)
    assert process.listens(port)
    assert not stranger.listens(port)


def test_a_missing_program_is_named(home: Path) -> None:
    with pytest.raises(ServiceError, match="there is no program no-such-program"):
        processes.start(home, "one", ["no-such-program"])


def test_the_log_of_an_earlier_run_is_kept_beside_the_new_one(start: Start) -> None:
    first = start("one", "print('first')")
    first.wait_ready(lambda: not first.alive, 10)
    first.stop()
    second = start("one", SLEEP)
    assert second.log_tail() == "up"
    assert tail(second.record.log.with_name("one.log.1"), 5) == "first"


def test_a_foreground_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from infra import processes; "
        f"processes.start(Path({str(tmp_path)!r}), 'one', "
        f"[sys.executable, '-S', '-c', {SLEEP!r}], die_with_parent=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ) as parent:
        assert wait_until(lambda: "up" in tail(tmp_path / "logs" / "one.log", 1))
        # Its record comes a moment after it: the child may be the faster of the two.
        assert wait_until(lambda: processes.find(tmp_path, "one") is not None)
        process = processes.find(tmp_path, "one")
        assert process is not None
        assert process.alive
        parent.kill()
    assert wait_until(lambda: not process.alive)


def test_a_process_hears_sigint_although_its_parent_is_deaf_to_it(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start("one", SLEEP)
    finally:
        signal.signal(signal.SIGINT, before)
    os.kill(process.record.pid, signal.SIGINT)
    assert wait_until(lambda: not process.alive)


def test_a_busy_port_is_refused_with_the_name_of_its_service() -> None:
    port = ports.free_port()
    with socket.create_server((ports.HOST, port)):
        with pytest.raises(ServiceError, match=rf"port {port} for Prefect is in use by process {os.getpid()}"):
            ports.choose_port("Prefect", port, usual=port)
        assert ports.choose_port("Prefect", None, usual=port) != port
    assert ports.choose_port("Prefect", None, usual=port) == port
