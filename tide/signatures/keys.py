"""Key files: made once, readable by their owner alone.

Owns the file of a private key. What is signed with it, and whose signatures count, is decided elsewhere.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from tide.errors import ConfigError
from tide.files import temporary_beside
from tide.signatures.signing import SigningKey

FOLDER = "keys"
SIGNING = "signing.pem"


def ensure(home: Path, name: str = SIGNING) -> tuple[Path, SigningKey]:
    """A key under a home; made when there is none. Raises ConfigError when the one there is not usable."""
    file = locate(home, name)
    if not file.exists():
        _make(file)
    return file, read(file)


def locate(home: Path, name: str = SIGNING) -> Path:
    """Where a key of a home lies."""
    return home.absolute() / FOLDER / name


def reviewer(name: str) -> str:
    """File of a reviewer's own key. Raises ConfigError for a name that is no plain one."""
    if not re.fullmatch(r"[\w][\w .@+-]{0,63}", name):
        raise ConfigError(f"reviewer {name[:80]!r}: 1 to 64 letters, digits, spaces and . @ + - _ are taken")
    return f"reviewer-{name}.pem"


def read(path: Path) -> SigningKey:
    """Read a private key.

    Raises:
        ConfigError: it is missing, no Ed25519 key, or others than its owner may read it.
    """
    try:
        mode, pem = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as error:
        raise ConfigError(f"private key {path}: {error.strerror}; `tide init` makes one") from error
    if mode & 0o077:
        raise ConfigError(f"private key {path} has mode {mode:04o}: others may read it; `chmod 600` it")
    try:
        return SigningKey.from_pem(pem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    temporary.touch(mode=0o600, exist_ok=False)
    try:
        temporary.write_bytes(SigningKey.generate().pem())
        # A link, not a rename: two that make a key at once must end with one, not each with its own.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
