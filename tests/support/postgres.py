"""A PostgreSQL server on loopback for tests, from the packages of the system; there is none without them."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra import ports, processes

OTHER_USERS = ("postgres", "nobody")
"""Who runs it when the tests are root's: PostgreSQL refuses to be root."""


def programs() -> Path | None:
    """Folder of initdb and postgres; None when PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3].split(".")[0]))
    if found:
        return found[-1].parent
    named = shutil.which("initdb")
    return Path(named).resolve().parent if named else None


@contextmanager
def postgres(bin_folder: Path, home: Path, *, user: str, password: str, database: str) -> Iterator[int]:
    """Run a server over an empty folder, and give its port; the folder is removed at the end.

    Args:
        home: where its process is recorded.
        user: superuser of the server; signs in by password.
    """
    # Not under pytest's folders: those are closed to the user that runs it.
    folder = Path(tempfile.mkdtemp(prefix="tide-postgres-"))
    become = _become(folder)
    secret, data, port = folder / "password", folder / "data", ports.free_port()
    try:
        secret.write_text(password)
        secret.chmod(0o644)  # for the moment of initdb, of a password that only this test knows
        initdb = ["initdb", "--pgdata", str(data), "--username", user, "--pwfile", str(secret)]
        initdb += ["--auth", "scram-sha-256", "--no-sync", "--no-instructions", "--encoding", "UTF8", "--locale", "C"]
        _run([*become, str(bin_folder / initdb[0]), *initdb[1:]])
        secret.unlink()
        options = ["-D", str(data), "-h", ports.HOST, "-p", str(port), "-k", "", "-c", "fsync=off"]
        server = processes.start(home, "postgres", [*become, str(bin_folder / "postgres"), *options], cwd=folder)
        try:
            server.wait_ready(lambda: _ready(bin_folder, port), 30.0)
            env = os.environ | {"PGPASSWORD": password}
            _run([str(bin_folder / "createdb"), "-h", ports.HOST, "-p", str(port), "-U", user, database], env=env)
            yield port
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _become(folder: Path) -> list[str]:
    if os.geteuid() != 0:
        return []
    user = next(pwd.getpwnam(name) for name in OTHER_USERS if _exists(name))
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _ready(bin_folder: Path, port: int) -> bool:
    asked = [str(bin_folder / "pg_isready"), "-q", "-h", ports.HOST, "-p", str(port)]
    return subprocess.run(asked, check=False).returncode == 0


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd="/")
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
