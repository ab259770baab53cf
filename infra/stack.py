"""How a running stack is found again: its settings file, its engine's options, its lock, the state of its parts.

Owns ``<home>/run``. Starts and ends nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from infra import prefect, processes, sglang
from infra.files import write_private
from infra.lakefs.server import NAME
from infra.sglang import SglangOptions
from tide.errors import ServiceError

PARTS = (NAME, prefect.SERVER, sglang.NAME, *map(prefect.worker_name, prefect.POOLS))


@dataclass(frozen=True)
class PartStatus:
    """One part of a stack, as it is now."""

    name: str
    state: Literal["running", "died", "stopped", "external"]
    """``died``: it was started, has ended, and nobody asked for it. ``external``: somebody else runs it."""
    pid: int | None = None
    url: str = ""
    memory_bytes: int = 0
    """Resident, of all its processes."""
    since: str = ""


@dataclass(frozen=True)
class Stack:
    """Where a stack is and how it is reached."""

    home: Path
    env: Mapping[str, str]
    """Content of ``stack.env``: TIDE_* settings, keys included, and PREFECT_API_URL."""
    engine: SglangOptions

    @property
    def urls(self) -> dict[str, str]:
        """Addresses by part."""
        return {
            NAME: self.env["TIDE_LAKEFS_ENDPOINT"],
            prefect.SERVER: self.env["PREFECT_API_URL"].removesuffix("/api"),
            sglang.NAME: self.engine.url,
        }


def save(stack: Stack) -> None:
    """Write the files that other commands find the stack by; only this user may read them."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(stack.env.items())]
    write_private(stack.home / "run" / "engine.json", stack.engine.model_dump_json(indent=2))
    write_private(stack.home / "run" / "stack.env", "\n".join(lines) + "\n")


def read_env(home: Path) -> dict[str, str]:
    """Settings of the stack of a home; empty when there is none."""
    try:
        text = (home / "run" / "stack.env").read_text()
    except FileNotFoundError:
        return {}
    return dict(word.split("=", 1) for line in text.splitlines() for word in shlex.split(line, comments=True))


def load(home: Path) -> Stack:
    """The stack of a home, as it was last saved.

    Raises:
        ServiceError: there is none, or its files are damaged.
    """
    home = home.absolute()
    env = read_env(home)
    try:
        engine = SglangOptions.model_validate_json((home / "run" / "engine.json").read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise ServiceError(f"no stack is known in {home}: {error}; start one with `tide up`") from error
    if not env:
        raise ServiceError(f"no stack is known in {home}: stack.env is missing; start one with `tide up`")
    return Stack(home, env, engine)


def forget(home: Path) -> None:
    """Remove the files of a stack that is no more, keys included. Data stays."""
    for name in ("stack.env", "engine.json", f"{sglang.NAME}.secrets.yaml"):
        (home / "run" / name).unlink(missing_ok=True)


def part_statuses(home: Path) -> list[PartStatus]:
    """State of every part of a home's stack, in the order of start."""
    try:
        urls = load(home).urls
    except ServiceError:
        urls = {}
    return [_status(home, name, urls) for name in PARTS]


@contextlib.contextmanager
def exclusive(home: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keep other commands from starting or stopping parts of this home meanwhile; the kernel frees a dead holder's.

    Raises:
        ServiceError: another command does so now, and still after ``wait_s``.
    """
    (home / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "run" / "lock").open("w") as file:
        deadline = time.monotonic() + wait_s
        while not _lock(file):
            if time.monotonic() > deadline:
                raise ServiceError(f"another command starts or stops the stack of {home}: wait, or interrupt it")
            time.sleep(0.1)
        yield


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _status(home: Path, name: str, urls: Mapping[str, str]) -> PartStatus:
    process = processes.find(home, name)
    if process is None:
        # lakeFS is the one part that a stack may use without having started it.
        external = name == NAME and name in urls
        return PartStatus(name, "external", url=urls[name]) if external else PartStatus(name, "stopped")
    record = process.record
    if not process.alive:
        return PartStatus(name, "stopped" if record.stopping else "died", record.pid, since=record.started_at)
    return PartStatus(name, "running", record.pid, urls.get(name, ""), process.memory_bytes(), record.started_at)
