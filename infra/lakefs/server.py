"""One lakeFS server on loopback: keys and blocks in a folder, started, waited for, and ended by its recorded process.

Owns ``<home>/lakefs``: ``credentials.json`` (mode 0600), ``address.json``, ``kv/`` and ``blocks/``. Knows nothing of
repositories.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx
from pydantic import Field, ValidationError

from infra import ports, processes
from infra.files import write_private
from infra.lakefs.build import LAKEFS, MODULE
from infra.processes import ManagedProcess, Report
from tide.domain import Record
from tide.errors import ServiceError
from tide.files import write_durably

NAME = "lakefs"
USUAL_PORT = 8000
READY_S = 60.0


class Credentials(Record):
    """Keys of the first user, and the key that encrypts users' keys in the store."""

    access_key: str
    secret_key: str = Field(repr=False)
    encryption_key: str = Field(repr=False)


class LakefsServer:
    """A server over one home; use as a context manager, or ``start`` and ``stop``, also from different processes.

    Args:
        home: made when missing; ``<home>/lakefs`` is kept from one start to the next.
        port: when not given, 8000 if free, else any free one.
        binary: a server binary; found or built when not given.
        settings: ``LAKEFS_*`` settings in place of those in lakefs.yaml, such as another block store or database.
        ready_s: seconds that the server may take to answer.
        die_with_parent: end it when the calling thread ends; for the foreground.
        report: receives lines of progress.
    """

    def __init__(
        self,
        home: Path,
        *,
        port: int | None = None,
        binary: Path | None = None,
        settings: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
        die_with_parent: bool = False,
        report: Report = lambda _: None,
    ) -> None:
        self.home, self.folder = home.absolute(), home.absolute() / NAME
        self._port, self._binary, self._ready_s = port, binary, ready_s
        self._settings, self._die_with_parent, self._report = settings or {}, die_with_parent, report
        self._started: ManagedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def process(self) -> ManagedProcess | None:
        """The running server, started here or found by its record; None when it does not run."""
        found = self._started or processes.find(self.home, NAME)
        return found if found is not None and found.alive else None

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:port`` of the running server.

        Raises:
            ServiceError: it does not run.
        """
        if self.process is None:
            raise ServiceError(f"no lakeFS server runs on {self.folder}: start it first")
        return _url(int(json.loads((self.folder / "address.json").read_bytes())["port"]))

    @property
    def blocks(self) -> Path:
        """Folder of its block store."""
        return self.folder / "blocks"

    @property
    def credentials(self) -> Credentials:
        """Keys, made at the first start.

        Raises:
            ServiceError: there are none, or the file is damaged.
        """
        path = self.folder / "credentials.json"
        try:
            return Credentials.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ServiceError(f"lakeFS keys cannot be read from {path}: {error}") from error

    def start(self) -> None:
        """Start the server, wait until it answers, and make the first user at the first start.

        Raises:
            ServiceError: the port is busy, the home is already served, the keys of a filled folder are lost, or the
                server did not become ready; the message has the end of its log.
        """
        if (running := self.process) is not None:
            raise ServiceError(f"{self.folder} is already served by process {running.record.pid}; `tide down` ends it")
        port = ports.choose_port(NAME, self._port, USUAL_PORT)
        credentials = self._keys()
        write_durably(self.folder / "address.json", json.dumps({"port": port}).encode())
        process = self._launch(port, credentials.encryption_key)
        try:
            ready = f"{_url(port)}/api/v1/setup_lakefs"
            waited = process.wait_ready(lambda: ports.http_ok(ready), self._ready_s, self._report, poll_s=0.05)
            self._first_user(process, ready, credentials)
        except BaseException:
            # Also on Ctrl-C: a server left behind half-started would hold the folder's lock.
            process.stop()
            raise
        self._started = process
        self._report(f"{NAME}: {_url(port)} ready in {waited:.1f} s")

    def stop(self) -> None:
        """End the server and wait until it has ended; one that does not run is fine."""
        found = self._started or processes.find(self.home, NAME)
        if found is not None:
            found.stop()
        self._started = None

    def _keys(self) -> Credentials:
        path = self.folder / "credentials.json"
        if path.exists():
            return self.credentials
        if (self.folder / "kv").exists():
            raise ServiceError(f"{self.folder} holds a lakeFS store but no {path.name}: put it back, or move kv/ away")
        made = Credentials(
            access_key=f"AKIATIDE{secrets.token_hex(6).upper()}",
            secret_key=secrets.token_urlsafe(30),
            encryption_key=secrets.token_hex(32),
        )
        write_private(path, made.to_json())
        return made

    def _launch(self, port: int, encryption_key: str) -> ManagedProcess:
        binary = self._binary or LAKEFS.binary(say=self._report)
        # Settings of another lakeFS in the shell must not reach this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LAKEFS_")}
        environment |= self._settings
        environment["LAKEFS_LISTEN_ADDRESS"] = f"{ports.HOST}:{port}"
        environment["LAKEFS_AUTH_ENCRYPT_SECRET_KEY"] = encryption_key
        argv = [str(binary), "--config", str(MODULE / "lakefs.yaml"), "run"]
        return processes.start(
            self.home, NAME, argv, env=environment, cwd=self.folder, die_with_parent=self._die_with_parent
        )

    def _first_user(self, process: ManagedProcess, url: str, credentials: Credentials) -> None:
        key = {"access_key_id": credentials.access_key, "secret_access_key": credentials.secret_key}
        try:
            with httpx.Client(timeout=10.0, trust_env=False) as client:
                if client.get(url).raise_for_status().json().get("state") != "initialized":
                    client.post(url, json={"username": "tide", "key": key}).raise_for_status()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise ServiceError(f"lakeFS's first user could not be made: {error}\n{process.log_tail()}") from error


def _url(port: int) -> str:
    return f"http://{ports.HOST}:{port}"
