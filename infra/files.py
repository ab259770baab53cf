"""Private files and logs of local services. Knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tide.files import write_durably


def tail(path: Path, lines: int) -> str:
    """Last lines of a text file, read from its last 64 KiB; a note when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(empty log)"


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, whole or not at all; makes its folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_durably(path, text.encode(), mode=0o600)


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[int]:
    """Descriptor of a new, private log; an older one of the name is kept as ``.1``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_name(path.name + ".1"))
    # Engines print their arguments, keys included: the log is as private as the key.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
