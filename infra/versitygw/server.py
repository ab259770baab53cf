"""One S3 gateway on loopback over a folder: what lakeFS keeps its blocks in where there is no cloud.

Owns ``<home>/versitygw``: ``buckets/`` (a folder a bucket, a file an object) and ``keys.json`` (mode 0600). Knows
nothing of lakeFS but the names of the settings that point it here.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Self

from infra import ports, processes
from infra.files import write_private
from infra.processes import ManagedProcess, Report
from infra.versitygw.build import VERSITYGW
from tide.errors import ServiceError

NAME = "versitygw"
BUCKET = "tide"
REGION = "us-east-1"
USUAL_PORT = 7070
READY_S = 30.0


class S3Gateway:
    """A gateway with one bucket over one home; use as a context manager.

    Args:
        home: made when missing; ``<home>/versitygw`` is kept from one start to the next.
        port: when not given, 7070 if free, else any free one.
        report: receives lines of progress.
    """

    def __init__(self, home: Path, *, port: int | None = None, report: Report = lambda _: None) -> None:
        self.home, self.folder = home.absolute(), home.absolute() / NAME
        self._wanted_port, self._report = port, report
        self._process: ManagedProcess | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:port`` of the gateway that was started here."""
        return f"http://{ports.HOST}:{self._port}"

    @property
    def keys(self) -> tuple[str, str]:
        """Access key and secret key of its one user, made when first asked for.

        Raises:
            ServiceError: the file is damaged.
        """
        path = self.folder / "keys.json"
        if not path.exists():
            made = {"access_key": f"TIDE{secrets.token_hex(8).upper()}", "secret_key": secrets.token_hex(24)}
            write_private(path, json.dumps(made))
        try:
            found = json.loads(path.read_bytes())
            return str(found["access_key"]), str(found["secret_key"])
        except (ValueError, KeyError) as error:
            raise ServiceError(f"S3 keys cannot be read from {path}: {error}; put the file back") from error

    @property
    def namespace_prefix(self) -> str:
        """Where lakeFS may keep the repositories of the bucket: ``s3://bucket/``."""
        return f"s3://{BUCKET}/"

    def file(self, physical_address: str) -> Path:
        """The file that holds an object, by the address that lakeFS has for it."""
        return self.folder / "buckets" / physical_address.removeprefix("s3://")

    def start(self) -> None:
        """Start the gateway and wait until it answers.

        Raises:
            ServiceError: the port is busy, or the gateway did not become ready; the message has the end of its log.
        """
        (self.folder / "buckets" / BUCKET).mkdir(parents=True, exist_ok=True)
        self._port = ports.choose_port(NAME, self._wanted_port, USUAL_PORT)
        access, secret = self.keys
        argv = [str(VERSITYGW.binary(say=self._report)), "--port", f"{ports.HOST}:{self._port}", "--region", REGION]
        argv += ["--health", "/health", "posix", str(self.folder / "buckets")]
        environment = os.environ | {"ROOT_ACCESS_KEY": access, "ROOT_SECRET_KEY": secret}
        self._process = processes.start(self.home, NAME, argv, env=environment, cwd=self.folder)
        try:
            waited = self._process.wait_ready(
                lambda: ports.http_ok(f"{self.endpoint}/health"), READY_S, self._report, poll_s=0.05
            )
        except BaseException:
            self.stop()
            raise
        self._report(f"{NAME}: {self.endpoint} ready in {waited:.1f} s")

    def stop(self) -> None:
        """End the gateway and wait until it has ended; one that does not run is fine."""
        if self._process is not None:
            self._process.stop()
        self._process = None

    def lakefs_settings(self) -> dict[str, str]:
        """Settings that make a lakeFS server keep its blocks here; hand them over in its environment."""
        access, secret = self.keys
        return {
            "LAKEFS_BLOCKSTORE_TYPE": "s3",
            "LAKEFS_BLOCKSTORE_S3_ENDPOINT": self.endpoint,
            "LAKEFS_BLOCKSTORE_S3_REGION": REGION,
            "LAKEFS_BLOCKSTORE_S3_FORCE_PATH_STYLE": "true",
            "LAKEFS_BLOCKSTORE_S3_DISCOVER_BUCKET_REGION": "false",
            "LAKEFS_BLOCKSTORE_S3_CREDENTIALS_ACCESS_KEY_ID": access,
            "LAKEFS_BLOCKSTORE_S3_CREDENTIALS_SECRET_ACCESS_KEY": secret,
        }
