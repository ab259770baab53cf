"""Files and folders that are either absent or whole, also after a power cut.

Owns the order temp, fsync, rename, fsync of the parent folder. Knows nothing of what is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(path: Path, payload: bytes, *, mode: int = 0o666) -> None:
    """Write a file whole or not at all.

    The temporary name starts with a dot and carries the process id: two writers of the same name never share one.

    Args:
        mode: permissions of the new file, before the umask; given at creation, so that a secret is never readable.

    Raises:
        OSError: the disk refused; nothing was left under either name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``destination`` when the block ends well, and is gone when it does not.

    What stood at ``destination`` is replaced. The files' own durability is the block's affair.

    Raises:
        OSError: the disk refused, or another process published the same folder meanwhile; ours was removed.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        shutil.rmtree(destination, ignore_errors=True)
        temporary.rename(destination)
        sync_folder(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
