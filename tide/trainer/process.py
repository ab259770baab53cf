"""The training process: started in a group of its own, read line by line, and ended with all it started, in any case.

Owns the promise that no process of a run outlives the call that started it. torchrun gives each rank a session of its
own, which no signal to the group reaches: every process of a run therefore carries its mark (tide.recovery.ownership).
Knows nothing of SpecForge or of progress.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

from tide import proc
from tide.errors import TrainingCancelled, TrainingError
from tide.recovery.ownership import MARK, marked

TICK_S = 1.0
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL. SIGTERM saves nothing in SpecForge, so there is no reason to wait long."""
EXIT_S = 60.0
"""For the process to exit by itself after it has closed its output."""
EMPTY_S = 5.0
"""For the rest of the group to vanish after SIGKILL."""
_TAIL_LINES = 15


class GroupProcess:
    """One command in its own session. Use as a context manager; leaving it ends whatever came of it.

    Args:
        command: program and arguments.
        mark: the run's token; whatever carries it is ended with the command.
        env: the whole environment, less the mark.
        log: file that gets every line; appended.
        cwd: working folder.

    Raises:
        TrainingError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], *, mark: str, env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self.log = log
        self.mark = mark
        try:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                list(command),
                env={**env, MARK: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise TrainingError(f"training: {command[0]} cannot be started: {error}") from error
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="training-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Process id of the leader, and id of the group."""
        return self._process.pid

    def lines(self, tick_s: float = TICK_S) -> Iterator[str | None]:
        """Lines as they come; None whenever ``tick_s`` seconds passed without one. Ends with the output."""
        while True:
            try:
                line = self._lines.get(timeout=tick_s)
            except queue.Empty:
                yield None
                continue
            if line is None:
                return
            yield line

    def check_exit(self) -> None:
        """Wait for the process to exit by itself.

        Raises:
            TrainingError: it failed, was killed, or did not exit; has the end of its output.
        """
        if not self._exited(EXIT_S):
            raise TrainingError(f"training: closed its output but did not exit in {EXIT_S:.0f} s; it was ended")
        code = self.end()
        if code == 128 + signal.SIGTERM or code == -signal.SIGTERM:
            raise TrainingCancelled("training: the process was asked to stop from outside; nothing was exported")
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory is the usual reason)" if code == -signal.SIGKILL else ""
            raise TrainingError(f"training: killed by {name}{hint}; see {self.log}\n{self.tail()}")
        if code:
            raise TrainingError(f"training: exit code {code}; see {self.log}\n{self.tail()}")

    def end(self) -> int:
        """End every process of the run, politely first; returns the leader's exit code. Safe to call again."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            self._exited(GRACE_S)
            # Until it is reaped below, the leader is at worst a zombie: the group id cannot be anybody else's.
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._end_the_rest()
        self._reader.join(GRACE_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        return self._process.returncode

    def tail(self) -> str:
        """Last lines of the output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return "(no output)"

    def _read(self) -> None:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        with self.log.open("a") as log:
            for line in stream:
                log.write(line)
                log.flush()
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end_the_rest(self) -> None:
        """What left the group, and killed orphans, which take a moment to go."""
        deadline = time.monotonic() + EMPTY_S
        while (left := self.members()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def members(self) -> list[int]:
        """Processes of the run that live: of the group, or with its mark."""
        return sorted({pid for pid, group in _live() if group == self._process.pid} | set(marked(self.mark)))

    def _exited(self, timeout_s: float) -> bool:
        """Wait for the leader without reaping it."""
        deadline = time.monotonic() + timeout_s
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _live() -> list[tuple[int, int]]:
    """(process, group) of this machine; zombies, which hold nothing and may wait for ever, left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = proc.status(int(entry.name))
            if fields[proc.STATE] not in {"Z", "X"}:
                found.append((int(entry.name), int(fields[proc.GROUP])))
    return found


@contextlib.contextmanager
def sigterm_cancels() -> Iterator[None]:
    """Turn SIGTERM into TrainingCancelled, so that leaving the ``with`` blocks ends the group.

    By default SIGTERM ends Python at once and would leave the trainer behind. Only the main thread may handle signals:
    elsewhere this does nothing, and the caller's own cancellation reaches us as an exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(number: int, _frame: FrameType | None) -> None:
        # Once is enough: a second one must not interrupt the ending of the group.
        signal.signal(number, signal.SIG_IGN)
        raise TrainingCancelled("training: cancelled by SIGTERM; its process group has ended")

    previous = signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
