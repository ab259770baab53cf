"""Files that are either absent or whole, also after a power cut, and folders whose renames are durable.

Owns the order temp, fsync, rename, fsync of the folder. Knows nothing of what is written.
"""

from __future__ import annotations

import os
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


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
