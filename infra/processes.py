"""Processes of one machine: started in a session of their own, recorded by identity, ended by that identity alone.

Owns the records in ``<home>/run/*.json`` and the logs in ``<home>/logs``. Knows nothing of what the processes do.
Linux only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import ValidationError

from infra.ending import end
from infra.files import tail, write_private
from infra.identity import TOKEN, ProcessRecord, is_same, members, resident_bytes, start_ticks_of
from infra.spawn import becoming, spawn
from tide import proc
from tide.errors import ServiceError

Report = Callable[[str], None]
"""Where progress lines go."""


PROGRESS_S = 5.0
"""Between two lines of progress."""


@dataclass
class ManagedProcess:
    """A recorded process: started here, or found again by its record."""

    home: Path
    record: ProcessRecord
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    """Set when this process is the parent, so that the exit code can be read."""

    @property
    def name(self) -> str:
        """Name of the record, unique within a home."""
        return self.record.name

    @property
    def alive(self) -> bool:
        """True while the very process that was started runs; a zombie has ended."""
        if self.child is not None and self.child.poll() is not None:
            return False
        return is_same(self.record)

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None when running, or when it is not our child."""
        return None if self.child is None else self.child.poll()

    def log_tail(self, lines: int = 15) -> str:
        """Last lines of its log."""
        return tail(self.record.log, lines)

    def memory_bytes(self) -> int:
        """Resident memory of the process and all that it started, shared pages counted once a process."""
        return sum(resident_bytes(process) for process in members(self.record))

    def listens(self, port: int) -> bool:
        """True when the process, or what it started, listens on the port: an answer there is then no other's."""
        for process in members(self.record):
            with contextlib.suppress(psutil.Error):
                if any(c.status == psutil.CONN_LISTEN and c.laddr[1] == port for c in process.net_connections("tcp")):
                    return True
        return False

    def wait_ready(
        self, check: Callable[[], bool], timeout_s: float, report: Report = lambda _: None, poll_s: float = 0.2
    ) -> float:
        """Wait until ``check`` is true; a line of progress every five seconds. Returns the seconds waited.

        Raises:
            ServiceError: the process ended (with its last log lines), or was not ready in time.
        """
        began = time.monotonic()
        for _ in self._ticks(timeout_s, report, poll_s):
            if check():
                break
            if not self.alive:
                raise ServiceError(f"{self.name} ended{self._last_code()} before it was ready; {self._log_excerpt()}")
        return time.monotonic() - began

    def wait_exit(self, timeout_s: float, report: Report = lambda _: None) -> float:
        """Wait until a child has done its work and ended with 0. Returns the seconds waited.

        Raises:
            ServiceError: it ended with another code (with its last log lines), or not in time.
        """
        if self.child is None:
            raise ServiceError(f"{self.name} is not a child of this process: its exit code cannot be known")
        began = time.monotonic()
        for _ in self._ticks(timeout_s, report, poll_s=0.1):
            if self.child.poll() is not None:
                break
        if self.child.returncode:
            raise ServiceError(f"{self.name} ended with code {self.child.returncode}; {self._log_excerpt()}")
        return time.monotonic() - began

    def stop(self, grace_s: float = 10.0) -> None:
        """End the process and all that it started: SIGTERM, then SIGKILL after the grace. Safe to repeat.

        Raises:
            ServiceError: something of it survives SIGKILL; the record stays.
        """
        path = record_path(self.home, self.name)
        if path.exists():
            write_private(path, self.record.model_copy(update={"stopping": True}).model_dump_json(indent=2))
        end(self.record, grace_s)
        if self.child is not None:
            self.child.wait()
        path.unlink(missing_ok=True)

    def _ticks(self, timeout_s: float, report: Report, poll_s: float) -> Iterator[None]:
        """Once at once, then every ``poll_s``, with progress; raises ServiceError when time is up."""
        began = last = time.monotonic()
        while (now := time.monotonic()) - began <= timeout_s:
            yield
            if now - last >= PROGRESS_S:
                last = now
                report(f"{self.name}: {now - began:.0f} s of at most {timeout_s:.0f} s; {self.log_tail(1)[:100]}")
            time.sleep(poll_s)
        raise ServiceError(f"{self.name} was not ready within {timeout_s:.0f} s; {self._log_excerpt()}")

    def _last_code(self) -> str:
        if self.child is None:
            return ""
        # A process that is being torn down is neither itself any more nor a zombie yet.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f" with code {self.child.wait(5)}"
        return ""

    def _log_excerpt(self) -> str:
        return f"the end of {self.record.log}:\n{self.log_tail()}"


def start(
    home: Path,
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    cwd: Path | None = None,
    die_with_parent: bool = False,
) -> ManagedProcess:
    """Start a process in a session of its own and record who it is before returning.

    Args:
        env: the whole environment; None: this process's own.
        log: where stdout and stderr go, default ``<home>/logs/<name>.log``; an older one is kept as ``.1``.
        die_with_parent: the kernel sends it SIGTERM when the calling thread ends: for the foreground only, and to be
            called from a thread that lives as long as the service.

    Raises:
        ServiceError: one of that name runs already, or the program cannot be started.
    """
    if (earlier := find(home, name)) is not None and (left := members(earlier.record)):
        raise ServiceError(f"{name} runs already as process {left[0].pid}; stop it first (`tide down`)")
    if shutil.which(argv[0]) is None:
        raise ServiceError(f"{name} cannot be started: there is no program {argv[0]}")
    token = secrets.token_hex(16)
    log = (log if log is not None else home / "logs" / f"{name}.log").absolute()
    child = spawn(
        name,
        [*becoming(die_with_parent=die_with_parent), *argv],
        {**(os.environ if env is None else env), TOKEN: token},
        log,
        cwd,
    )
    try:
        record = ProcessRecord(
            name=name,
            pid=child.pid,
            start_ticks=start_ticks_of(child.pid) or 0,
            boot_id=proc.boot_id(),
            argv=tuple(argv),
            token=token,
            log=log,
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        write_private(record_path(home, name), record.model_dump_json(indent=2))
    except BaseException:
        # Nobody could find it again: a process without a record must not go on, whatever came between.
        child.kill()
        child.wait()
        raise
    return ManagedProcess(home, record, child)


def find(home: Path, name: str) -> ManagedProcess | None:
    """The recorded process of that name, running or not.

    Raises:
        ServiceError: the record cannot be read; nothing is ended on a guess.
    """
    path = record_path(home, name)
    try:
        return ManagedProcess(home, ProcessRecord.model_validate_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ServiceError(
            f"process record {path} is damaged: {error}; end the process by hand, then delete it"
        ) from error


def recorded(home: Path) -> list[ManagedProcess]:
    """All recorded processes, in the order they were started."""
    found = [find(home, path.name.removesuffix(".process.json")) for path in (home / "run").glob("*.process.json")]
    return sorted((p for p in found if p is not None), key=lambda p: (p.record.started_at, p.record.start_ticks))


def stop_all(
    home: Path, order: Sequence[str] = (), grace_s: float = 10.0, report: Report = lambda _: None
) -> list[str]:
    """End exactly what was recorded: names in ``order`` first, then the rest, youngest first. Returns the names ended.

    Raises:
        ServiceError: something could not be ended; the others were.
    """
    names = [p.name for p in reversed(recorded(home))]
    ended, failures = [], []
    for name in [n for n in order if n in names] + [n for n in names if n not in order]:
        process = find(home, name)
        if process is None:
            continue
        try:
            if members(process.record):
                ended.append(name)
            process.stop(grace_s)
            report(f"{name}: ended")
        except ServiceError as error:
            failures.append(str(error))
    if failures:
        raise ServiceError("; ".join(failures))
    return ended


def record_path(home: Path, name: str) -> Path:
    """Where the record of a process lies."""
    return home / "run" / f"{name}.process.json"
