"""A real Prefect server with a password, every deployment of prefect.yaml, and a worker without a key of the store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra import local, ports, prefect, prefect_access, processes
from infra.files import write_private

PASSWORD = "prefect:correct-horse-battery"


@dataclass(frozen=True)
class ClosedPrefect:
    """The running server."""

    home: Path
    port: int
    env: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://{ports.HOST}:{self.port}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, auth: bool = True) -> httpx.Response:
        name, _, secret = PASSWORD.partition(":")
        allowed = (name, secret) if auth else None
        url = f"{prefect.api_url(self.port)}/{path}"
        for _ in range(10):
            answer = httpx.request(method, url, json=body, auth=allowed, timeout=60, trust_env=False)
            # SQLite is locked for moments under load; Prefect's own client retries this too.
            if answer.status_code != 503:
                break
            time.sleep(0.5)
        return answer

    def start(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Id of a new run."""
        id = self.call("GET", f"deployments/name/{deployment}").raise_for_status().json()["id"]
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        made = self.call("POST", f"deployments/{id}/create_flow_run", body)
        return str(made.raise_for_status().json()["id"])

    def state(self, run: str) -> str:
        return str(self.call("GET", f"flow_runs/{run}").raise_for_status().json()["state"]["name"])

    def wait(self, run: str, wanted: str, seconds: float = 180) -> None:
        """Until a run is in a state. Fails when it failed, or when time is up."""
        deadline = time.monotonic() + seconds
        while (found := self.state(run)) != wanted:
            assert found not in ("Failed", "Crashed", "Cancelled"), found
            assert time.monotonic() < deadline, f"still {found} after {seconds} s"
            time.sleep(0.5)

    def tide(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The command, as somebody types it whose shell knows nothing of this server."""
        argv = [sys.executable, "-m", "tide.cli", *arguments, "--home", str(self.home)]
        return subprocess.run(argv, env={**self.env, **env}, capture_output=True, text=True, check=False, timeout=300)


@contextmanager
def running(
    home: Path, code: Path, flows: dict[str, str], deployments: list[dict[str, Any]], worker_env: dict[str, str]
) -> Iterator[ClosedPrefect]:
    """The server, for as long as the block lasts.

    Args:
        code: folder for further modules of flows.
        flows: their text by module name.
        deployments: entries for prefect.yaml, beside its own.
        worker_env: what the worker knows of the service.
    """
    for module, text in flows.items():
        (code / f"{module}.py").write_text(text)
    content = yaml.safe_load(prefect.PREFECT_FILE.read_text())
    content["deployments"] += deployments
    (code / "prefect.yaml").write_text(yaml.safe_dump(content))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIDE_", "PREFECT_"))}
    env = {**kept, "PYTHONPATH": os.pathsep.join([str(code), *sys.path])}
    port = ports.free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(prefect_access.SERVER_AUTH, PASSWORD)  # as whoever types `tide up` has it
        told = {"PREFECT_API_URL": prefect.api_url(port), **prefect_access.client_settings(os.environ)}
        write_private(home / "run" / "stack.env", "".join(f"{k}={v}\n" for k, v in told.items()))
        try:
            server = prefect.launch_server(home, port)
            prefect.wait_server(server, port, print, timeout_s=500)
            prefect.create_pools(port)
            worker = prefect.launch_worker(home, port, "cpu", {**env, **told, **worker_env})
            prefect.deploy(home, port, {**env, **told}, code / "prefect.yaml")
            prefect.wait_worker(worker, port, "cpu", print, timeout_s=300)
            yield ClosedPrefect(home, port, env)
        finally:
            processes.stop_all(home, local.STOP_ORDER, grace_s=10)
