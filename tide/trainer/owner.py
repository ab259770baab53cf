"""Who works in a run's folder: a file beside the run, by which a folder or process left behind is told from a live one.

Owns ``owner.json``: its form, its writing (temp, then rename) and whether the process it names still lives. Knows
nothing of what runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tide.domain import Record
from tide.files import write_durably

FILE = "owner.json"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable in which Prefect names the flow run to its process."""


class Owner(Record):
    """The process that works in a folder. A process id alone may have been given to another process since."""

    schema_version: Literal[1] = 1
    pid: int
    start_ticks: int
    """Start of the process in clock ticks after boot: field 22 of ``/proc/<pid>/stat`` (proc(5))."""
    flow_run: str = ""
    """Id of the Prefect flow run; empty outside of one."""
    started_at: float
    """Unix time at which the work in the folder began."""


@contextmanager
def owned(folder: Path) -> Iterator[Owner]:
    """This process is the owner of a folder while the block lasts; after it, however it ended, nobody is."""
    pid = os.getpid()
    ticks = start_ticks(pid)
    assert ticks is not None  # we are running
    owner = Owner(pid=pid, start_ticks=ticks, flow_run=os.environ.get(FLOW_RUN, ""), started_at=time.time())
    write_durably(folder / FILE, owner.to_json().encode())
    try:
        yield owner
    finally:
        (folder / FILE).unlink(missing_ok=True)


def read(folder: Path) -> Owner | None:
    """Who works in a folder; None when nobody does, or the file is no such record."""
    try:
        return Owner.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def alive(owner: Owner) -> bool:
    """Whether that very process still runs on this machine; a zombie does not."""
    return start_ticks(owner.pid) == owner.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process of this machine started, clock ticks after boot; None when there is none, or only a zombie."""
    try:
        # The command, field 2, may itself hold spaces and brackets: count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])
