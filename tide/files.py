"""Files and folders that are either absent or whole, also after a power cut and beside other writers of the same name.

Owns the order temp, fsync, rename, fsync of the parent folder, and a lock that is waited for. Knows nothing of what is
written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


def write_durably(path: Path, payload: bytes, *, mode: int = 0o666) -> None:
    """Write a file whole or not at all.

    Args:
        mode: permissions of the new file, before the umask; given at creation, so that a secret is never readable.

    Raises:
        OSError: the disk refused; nothing was left under either name.
    """
    temporary = temporary_beside(path)
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
def whole_folder(destination: Path, *, replace: bool = True) -> Iterator[Path]:
    """A temporary folder that becomes ``destination`` when the block ends well, and is gone when it does not.

    The files' own durability is the block's affair.

    Args:
        replace: what stands at ``destination`` is replaced. False, for a folder that is named by its content: what
            stands there by the end is that content already, perhaps being read, and stays; ours is removed.

    Raises:
        OSError: the disk refused, or another process replaced the same folder meanwhile; ours was removed.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(destination)
    try:
        temporary.mkdir()
        yield temporary
        if replace:
            shutil.rmtree(destination, ignore_errors=True)
        try:
            temporary.rename(destination)
        except OSError as error:
            if replace or error.errno not in _TAKEN:
                raise
        sync_folder(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_beside(path: Path) -> Path:
    """A hidden name in the same folder that no other writer has: not another thread, nor a process of another host."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


@contextmanager
def held(path: Path, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Hold a lock file, waiting for who holds it; the lock ends with the process, however it ends.

    Args:
        path: made when missing, and left there.
        on_wait: told once who is waited for (a process id, as far as it is known), before the waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            on_wait(file.read().strip() or "unknown")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
