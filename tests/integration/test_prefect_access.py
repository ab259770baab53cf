"""A Prefect server with a password, its worker and the command; and a secret that reaches a flow and nobody else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import local, ports, prefect, prefect_access, processes
from infra.files import write_private
from tide.errors import ServiceError

PASSWORD = "prefect:correct-horse-battery"
SECRET = "s3ntinel-of-the-store"
FLOWS = """
import hashlib, os
from pathlib import Path
from prefect import flow
from tide.config import Settings

@flow(name="keyed", log_prints=True)
def keyed(out: str) -> None:
    config = Settings()
    print("settings", config, config.model_dump())
    found = config.lakefs_secret_key.get_secret_value()
    Path(out).write_text(hashlib.sha256(found.encode()).hexdigest() + os.environ["TIDE_SERVICE"])
"""
DEPLOYMENTS = """
name: test
pull: []
deployments:
  - name: keyed
    entrypoint: keyed_flows.keyed
    work_pool: {name: cpu, job_variables: {command: python -m prefect.engine, env: {TIDE_SERVICE: of-the-deployment}}}
"""


@dataclass(frozen=True)
class Rig:
    """A closed Prefect server with one worker that has no key of the store."""

    home: Path
    port: int
    env: dict[str, str]

    def get(self, path: str, *, auth: bool = True) -> httpx.Response:
        headers = prefect_access.headers({prefect_access.CLIENT_AUTH: PASSWORD}) if auth else {}
        return httpx.get(f"{prefect.api_url(self.port)}/{path}", headers=headers, timeout=30, trust_env=False)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = prefect_access.headers({prefect_access.CLIENT_AUTH: PASSWORD})
        return httpx.post(
            f"{prefect.api_url(self.port)}/{path}", json=body, headers=headers, timeout=30, trust_env=False
        )

    def tide(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tide.cli", *arguments, "--home", str(self.home)]
        return subprocess.run(argv, env={**self.env, **env}, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    home, code, port = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("code"), ports.free_port()
    (code / "keyed_flows.py").write_text(FLOWS)
    (code / "prefect.yaml").write_text(DEPLOYMENTS)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIDE_", "PREFECT_"))}
    env = {**kept, "PYTHONPATH": os.pathsep.join([str(code), *sys.path])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(prefect_access.SERVER_AUTH, PASSWORD)  # as the person who types `tide up` has it
        told = {**env, **prefect_access.client_settings(os.environ), "PREFECT_API_URL": prefect.api_url(port)}
        lines = [f"{k}={v}" for k, v in told.items() if k.startswith("PREFECT_")]
        write_private(home / "run" / "stack.env", "\n".join(lines) + "\n")
        try:
            server = prefect.launch_server(home, port)
            prefect.wait_server(server, port, print)
            prefect.create_pools(port)
            worker = prefect.launch_worker(home, port, "cpu", told)
            prefect.deploy(home, port, told, code / "prefect.yaml")
            prefect.wait_worker(worker, port, "cpu", print)
            yield Rig(home, port, env)
        finally:
            processes.stop_all(home, local.STOP_ORDER, grace_s=10)


def test_without_the_password_the_api_says_no_and_health_says_yes(rig: Rig) -> None:
    assert rig.get("health", auth=False).status_code == 200
    for path in ("work_pools/cpu", "admin/settings", "deployments/name/keyed/keyed"):
        assert rig.get(path, auth=False).status_code == 401
    assert rig.get("deployments/name/keyed/keyed").status_code == 200


def test_our_own_calls_without_the_password_fail_by_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prefect_access.SERVER_AUTH)
    with pytest.raises(ServiceError, match="401"):
        prefect.create_pools(rig.port)


def test_a_secret_reaches_the_flow_by_its_block_and_shows_nowhere(rig: Rig, tmp_path: Path) -> None:
    """`tide secrets push` and `tide run` with the password of the stack's own file; the worker had no key before."""
    pushed = rig.tide("secrets", "push", "--pool", "cpu", TIDE_LAKEFS_SECRET_KEY=SECRET, TIDE_SERVICE="svc")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    assert "block secret/svc-lakefs-secret-key" in pushed.stdout
    done = rig.tide("run", "keyed", "--param", f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = hashlib.sha256(SECRET.encode()).hexdigest() + "of-the-deployment"
    assert (tmp_path / "out").read_text() == expected, "the deployment's own environment is kept beside the pool's"
    assert "settings" in logs(rig)
    shown = [pushed.stdout, done.stdout, done.stderr, logs(rig), *everything(rig)]
    assert not any(SECRET in text or "correct-horse" in text for text in shown)


def logs(rig: Rig) -> str:
    """Of all flow runs, as the UI shows them."""
    return rig.post("logs/filter", {"limit": 200}).text


def everything(rig: Rig) -> Iterator[str]:
    """What the server tells of deployments, runs, pools and blocks, and all of its home but the stack's own file."""
    yield rig.get("deployments/name/keyed/keyed").text
    yield rig.get("work_pools/cpu").text
    for path in ("flow_runs/filter", "block_documents/filter", "artifacts/filter", "events/filter"):
        yield rig.post(path, {}).text
    for path in rig.home.rglob("*"):
        if path.is_file() and path.name != "stack.env":
            yield path.read_bytes().decode(errors="replace")
