"""Who promotes: a process of a host, by a name that no later process has. Knows nothing of what it does."""

from __future__ import annotations

import os
import socket

from tide import proc


def owner() -> str:
    """This process as a lease names it: ``host/process/start``; a process id alone comes back after a while."""
    return f"{socket.gethostname()}/{os.getpid()}/{_started(os.getpid())}"


def has_died(run: str) -> bool:
    """True when the promoter was a process of this host that is no more; of another host nothing is known."""
    host, _, rest = run.partition("/")
    pid, _, started = rest.partition("/")
    return host == socket.gethostname() and pid.isdecimal() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process of this host began, in ticks since boot; empty when there is none, or no /proc."""
    try:
        return proc.status(pid)[proc.START]
    except (OSError, IndexError):
        return ""
