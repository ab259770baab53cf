"""Whose a training process is: a file in the run's folder, and a mark that every process of the run inherits.

Owns the file, the mark, the search for what carries it, and its end. The mark goes into the environment of what a run
starts, never into this process's own: two runs may train in one process. A pid is never trusted alone: the flow's
process is known by pid, start tick and boot, and a training process by the mark in its environment, read again at the
moment of each signal through a descriptor that a reused pid cannot take over. Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tide import proc
from tide.domain import Record
from tide.errors import BadInputError, ServiceError
from tide.files import write_durably

MARK = "TIDE_TRAINING_RUN"
"""Environment variable with the run's token, which the trainer is started with, so that all it starts inherit it."""
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable in which Prefect names the flow run to its process."""
FILE = "run.json"
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL. SIGTERM saves nothing in a trainer."""
_GONE_S = 5.0


class Owner(Record):
    """Who works in a folder."""

    schema_version: Literal[1] = 1
    token: str
    flow_run: str | None
    host: str
    boot_id: str
    pid: int
    """The flow's process."""
    start_ticks: int
    """Its start in clock ticks since boot; with the boot it never repeats."""
    at: float


def claim(folder: Path, flow_run: str | None = None) -> Owner:
    """Say in ``folder/run.json`` that this process works there; what it starts for it is to carry ``Owner.token``.

    Args:
        flow_run: id of the run it is for; when None, the one whose process this is by its environment.
    """
    pid = os.getpid()
    ticks = _start_ticks(pid)
    assert ticks is not None
    owner = Owner(
        token=secrets.token_hex(16),
        flow_run=flow_run or os.environ.get(FLOW_RUN),
        host=socket.gethostname(),
        boot_id=proc.boot_id(),
        pid=pid,
        start_ticks=ticks,
        at=time.time(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / FILE, owner.to_json().encode())
    return owner


def read_owner(folder: Path) -> Owner | None:
    """The owner of a folder; None when it names none.

    Raises:
        BadInputError: the file is no owner file; nothing is ended on a guess.
    """
    path = folder / FILE
    try:
        return Owner.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BadInputError(f"{path} is no owner file: look at what runs in {folder}, then delete it") from error


def is_here(owner: Owner) -> bool:
    """True when the folder was worked on by this machine, whose processes can be seen."""
    return owner.host == socket.gethostname()


def flow_alive(owner: Owner) -> bool:
    """True while the very process that wrote the file runs; a zombie has ended."""
    return owner.boot_id == proc.boot_id() and _start_ticks(owner.pid) == owner.start_ticks


def members(owner: Owner) -> list[int]:
    """Processes that carry the run's mark, by pid. Zombies, which have no environment, are left out."""
    if owner.boot_id != proc.boot_id():
        return []
    return marked(owner.token)


def marked(token: str) -> list[int]:
    """Processes of this machine that were started with a mark, by pid. Zombies, which have no environment, are not."""
    pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return sorted(pid for pid in pids if _marked(pid, token))


def end_members(owner: Owner, grace_s: float = GRACE_S) -> int:
    """End every process that carries the mark: SIGTERM, then SIGKILL after the grace. Returns how many there were.

    Raises:
        ServiceError: something survives SIGKILL; names the pids.
    """
    found = members(owner)
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _GONE_S)):
        for pid in members(owner):
            _signal(pid, owner.token, number)
        _wait_gone(owner, patience)
    if left := members(owner):
        pids = ", ".join(map(str, left))
        raise ServiceError(f"processes {pids} of training run {owner.flow_run} do not end: see `ps -fp {pids}`")
    return len(found)


def users(folder: Path) -> list[int]:
    """Processes that work in a folder or below, by pid: of a folder that does not say whose it is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            place = (entry / "cwd").readlink()
            if folder.absolute() in (place, *place.parents):
                found.append(int(entry.name))
    return found


def _signal(pid: int, token: str, number: signal.Signals) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor holds the process: if it carries the mark now, it is the one that gets the signal.
        if _marked(pid, token):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def _wait_gone(owner: Owner, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while members(owner) and time.monotonic() < deadline:
        time.sleep(0.05)


def _marked(pid: int, token: str) -> bool:
    try:
        return f"{MARK}={token}".encode() in proc.environment(pid)
    except OSError:
        return False  # gone, or another user's


def _start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when there is none, or a zombie."""
    try:
        fields = proc.status(pid)
    except OSError:
        return None
    return None if fields[proc.STATE] in {"Z", "X"} else int(fields[proc.START])
