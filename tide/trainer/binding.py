"""A process that must not outlive the one that started it.

Owns the request to the kernel (prctl(2), PR_SET_PDEATHSIG). The kernel forgets it over an exec of a set-uid program and
takes the death of the starting *thread* for the parent's: start such processes from a thread that lives as long.
"""

from __future__ import annotations

import ctypes
import os
import signal

PARENT = "TIDE_TRAINER_PARENT"
"""Environment variable with the process id that this process must not outlive."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies, even by SIGKILL; exit if that has happened already."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit(f"the process {parent} that started this training is gone")
