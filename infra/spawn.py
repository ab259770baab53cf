"""One process in a session of its own, with its output in a log. Records nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.files import open_log
from tide.errors import ServiceError

_BECOME = (
    "import ctypes, os, signal, sys; "
    "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]; "
    "parent = int(sys.argv[1]); "
    "parent and ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0); "
    "parent in (0, os.getppid()) or sys.exit('the parent has ended'); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Listens to signals again (a shell's background job is born deaf to SIGINT, by which Prefect's worker stops itself),
asks for SIGTERM at the parent's death (1 is PR_SET_PDEATHSIG), then becomes the program. A step of its own, because
code between fork and exec is unsafe when the parent has threads."""


def becoming(*, die_with_parent: bool) -> list[str]:
    """What to put before a command line; with ``die_with_parent`` it gets SIGTERM when the calling thread ends."""
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid() if die_with_parent else 0)]


def spawn(
    name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None
) -> subprocess.Popen[bytes]:
    """Start a process. Raises ServiceError when the program cannot be run."""
    with open_log(log) as output:
        try:
            return subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServiceError(f"{name} cannot be started: {argv[0]}: {error.strerror}") from error
