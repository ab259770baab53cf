"""Key files: made once, readable by their owner alone.

Owns the file of a private key. What is signed with it, and whose signatures count, is decided elsewhere.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tide.errors import ConfigError
from tide.files import temporary_beside
from tide.signing import SigningKey

FOLDER = "keys"
SIGNING = "signing.pem"


def ensure(home: Path) -> tuple[Path, SigningKey]:
    """The signing key under a home; made when there is none. Raises ConfigError when the one there is not usable."""
    path = home.absolute() / FOLDER / SIGNING
    if not path.exists():
        _make(path)
    return path, read(path)


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
