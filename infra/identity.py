"""Who a process is: a pid together with its start tick and the boot id, which never repeats, and a token it inherits.

Owns the record and the search for what belongs to it. Starts and ends nothing. Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from tide import proc

TOKEN = "TIDE_PROCESS"
"""Environment variable that every descendant inherits, whatever session it moves to."""

Leader = Literal["ours", "gone", "another"]
"""What runs under the recorded pid."""


class ProcessRecord(BaseModel):
    """The identity of a started process, as kept in ``<home>/run/<name>.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    pid: int
    start_ticks: int
    """Clock ticks from boot to the start, as the kernel counts them; unlike a wall time it never moves."""
    boot_id: str
    argv: tuple[str, ...]
    token: str
    """Random value of TIDE_PROCESS in the environment of the process and of all it starts."""
    log: Path
    started_at: str
    stopping: bool = False
    """Set before it is told to end: whoever watches need not raise an alarm."""


def members(record: ProcessRecord) -> list[psutil.Process]:
    """The process, its session and everything that carries its token, wherever it moved. Zombies are left out.

    Tokens can be lost: a child may be given a clean environment, and a program that rewrites its title wipes its own.
    The session then decides, which is ours as long as its leader is. With the leader gone only wiped environments
    count, with another process under its pid nothing does.
    """
    if record.boot_id != proc.boot_id():
        return []
    leader: Leader = "ours" if is_same(record) else "gone" if start_ticks_of(record.pid) is None else "another"
    found = []
    for pid in psutil.pids():
        if _belongs(pid, record, leader):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if is_live(process):
                    found.append(process)
    return found


def is_live(process: psutil.Process) -> bool:
    """True while it runs; a zombie has ended, and a pid given anew is another process."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_ticks_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process."""
    try:
        return int(proc.status(pid)[proc.START])
    except (FileNotFoundError, ProcessLookupError):
        return None


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory; 0 when it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _environment(pid: int) -> bytes | None:
    """The raw environment of a process; None when it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None


def _belongs(pid: int, record: ProcessRecord, leader: Leader) -> bool:
    environment = _environment(pid)
    if environment is None:
        return False
    if f"{TOKEN}={record.token}".encode() in environment.split(b"\0"):
        return True
    try:
        in_session = os.getsid(pid) == record.pid
    except ProcessLookupError:
        return False
    not_older = (start_ticks_of(pid) or 0) >= record.start_ticks
    wiped = not environment.partition(b"\0")[0]
    return in_session and not_older and (leader == "ours" or (leader == "gone" and wiped))


def is_same(record: ProcessRecord) -> bool:
    """True when the recorded pid is still the recorded process: same boot, same start tick, same command or token."""
    if record.boot_id != proc.boot_id() or start_ticks_of(record.pid) != record.start_ticks:
        return False
    try:
        process = psutil.Process(record.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = tuple(process.cmdline())
    except psutil.Error:
        return False
    environment = _environment(record.pid) or b""
    if not command or not environment:
        return True  # the kernel shows neither in the middle of an exec; pid, tick and boot have matched already
    return command == record.argv or f"{TOKEN}={record.token}".encode() in environment.split(b"\0")
