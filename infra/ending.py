"""Ends a recorded process and all that belongs to it, and nothing else."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence

import psutil

from infra.identity import ProcessRecord, is_live, members
from tide.errors import ServiceError


def end(record: ProcessRecord, grace_s: float) -> None:
    """SIGTERM to every member, SIGKILL to what is left after the grace. Raises ServiceError when something survives."""
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 3.0), (signal.SIGKILL, 3.0)):
        alive = members(record)
        if not alive:
            return
        for process in alive:
            # psutil compares the start time once more, so a pid given anew in between is not signalled.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _wait_gone(alive, patience)
    if left := members(record):
        pids = ", ".join(str(p.pid) for p in left)
        raise ServiceError(f"{record.name}: processes {pids} do not end; look at them with `ps -fp {pids}`")


def _wait_gone(processes: Sequence[psutil.Process], patience_s: float) -> None:
    # psutil's own wait would reap our children and lose their exit codes; a zombie is gone enough.
    deadline = time.monotonic() + patience_s
    while any(is_live(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
