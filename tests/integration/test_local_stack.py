"""The parts of a stack on this machine: a real Prefect server and worker, ended exactly; a start that fails cleanly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import local, ports, prefect, processes
from tide.errors import ServiceError

FLOWS = """
import os, time
from pathlib import Path
from prefect import flow

@flow(name="trivial")
def trivial(out: str, seconds: float = 0.0) -> None:
    Path(out).write_text(" ".join([os.environ["TIDE_SERVICE"], os.environ["PREFECT_API_URL"], str(os.getpid())]))
    time.sleep(seconds)
"""
DEPLOYMENTS = """
name: test
pull: []
deployments:
  - name: trivial
    entrypoint: trivial_flows.trivial
    work_pool: {name: cpu, job_variables: {command: python -m prefect.engine}}
"""


@dataclass(frozen=True)
class Rig:
    """A Prefect server with one worker, and a folder of flows."""

    home: Path
    port: int
    env: dict[str, str]

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        for _ in range(10):
            answer = httpx.request(
                method, f"{prefect.api_url(self.port)}/{path}", json=body, timeout=30, trust_env=False
            )
            # SQLite is locked for moments under load; Prefect's own client retries this too.
            if answer.status_code != 503:
                break
            time.sleep(0.5)
        return answer.raise_for_status().json()

    def run(self, **parameters: Any) -> str:
        deployment = self.call("GET", "deployments/name/trivial/trivial")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.call("POST", f"deployments/{deployment['id']}/create_flow_run", body)["id"])

    def state(self, run: str) -> str:
        return str(self.call("GET", f"flow_runs/{run}")["state"]["type"])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    home, code, port = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("code"), ports.free_port()
    (code / "trivial_flows.py").write_text(FLOWS)
    (code / "prefect.yaml").write_text(DEPLOYMENTS)
    env = {**os.environ, "TIDE_SERVICE": "rig", "PYTHONPATH": os.pathsep.join([str(code), *sys.path])}
    try:
        server = prefect.launch_server(home, port)
        prefect.wait_server(server, port, print)
        prefect.create_pools(port)
        worker = prefect.launch_worker(home, port, "cpu", env)
        prefect.deploy(home, port, env, code / "prefect.yaml")
        prefect.wait_worker(worker, port, "cpu", print)
        yield Rig(home, port, env)
    finally:
        processes.stop_all(home, local.STOP_ORDER, grace_s=10)


def wait_for(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


def test_a_deployment_runs_on_the_worker_with_the_settings_of_the_stack(rig: Rig, tmp_path: Path) -> None:
    run = rig.run(out=str(tmp_path / "out"))
    assert wait_for(lambda: rig.state(run) in {"COMPLETED", "FAILED", "CRASHED"}, 60)
    assert rig.state(run) == "COMPLETED"
    assert (tmp_path / "out").read_text().split()[:2] == ["rig", prefect.api_url(rig.port)]


def test_work_pools_are_made_once_and_training_runs_one_at_a_time(rig: Rig) -> None:
    prefect.create_pools(rig.port)
    assert rig.call("GET", "work_pools/mi250")["concurrency_limit"] == 1
    assert rig.call("GET", "work_pools/cpu")["type"] == "process"


def test_a_clusters_job_templates_become_pools_as_they_are(rig: Rig) -> None:
    folder = Path(__file__).parents[2] / "infra" / "pools"
    kubernetes, slurm = folder / "kubernetes.json", folder / "slurm.json"
    command = ["work-pool", "create", "on-kubernetes", "--type", "kubernetes", "--base-job-template", str(kubernetes)]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *command],
        env=prefect.environment(rig.home, rig.port, rig.env),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    body = {"name": "on-slurm", "type": "process", "base_job_template": json.loads(slurm.read_text())}
    rig.call("POST", "work_pools/", body)
    for name, template in (("on-kubernetes", kubernetes), ("on-slurm", slurm)):
        assert rig.call("GET", f"work_pools/{name}")["base_job_template"] == json.loads(template.read_text())


def test_a_flow_that_cannot_be_imported_fails_the_deployment_by_name(rig: Rig, tmp_path: Path) -> None:
    broken = DEPLOYMENTS.partition("deployments:\n")[2].replace("trivial_flows.trivial", "no_such_module.flow")
    (tmp_path / "prefect.yaml").write_text(DEPLOYMENTS + broken.replace("name: trivial", "name: broken"))
    with pytest.raises(ServiceError, match="no_such_module"):
        prefect.deploy(rig.home, rig.port, rig.env, tmp_path / "prefect.yaml")


def test_a_second_server_of_one_home_is_refused(rig: Rig) -> None:
    with pytest.raises(ServiceError, match="prefect runs already as process"):
        prefect.launch_server(rig.home, ports.free_port())


def test_status_and_a_second_up_name_what_runs(rig: Rig) -> None:
    states = {part.name: part for part in local.status(rig.home)}
    assert states["prefect"].state == states["worker-cpu"].state == "running"
    assert states["prefect"].memory_bytes > 10_000_000
    assert states["sglang"].state == "stopped"
    with pytest.raises(ServiceError, match=r"runs already \(prefect, worker-cpu\); end it with `tide down`"):
        local.up(rig.home, report=print)


# Last: it ends the rig.
def test_down_ends_a_running_flow_its_worker_and_the_server_and_nothing_else(rig: Rig, tmp_path: Path) -> None:
    rig.run(out=str(tmp_path / "out"), seconds=300)
    assert wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().split(), 60)
    flow = int((tmp_path / "out").read_text().split()[2])
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as stranger:
        assert local.down(rig.home) == ["worker-cpu", "prefect"]
        assert stranger.poll() is None
        stranger.kill()
    assert not Path(f"/proc/{flow}").exists()
    assert ports.is_free(rig.port)
    assert {part.state for part in local.status(rig.home)} == {"stopped"}
    assert local.down(rig.home) == []


def test_a_busy_port_stops_up_before_anything_is_started(tmp_path: Path) -> None:
    port = ports.free_port()
    with (
        socket.create_server((ports.HOST, port)),
        pytest.raises(ServiceError, match=f"port {port} for SGLang is in use"),
    ):
        local.up(tmp_path, local.Wanted(engine_port=port))
    assert {part.state for part in local.status(tmp_path)} == {"stopped"}


def test_a_start_that_fails_half_way_ends_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "lakefs"
    binary.write_text("#!/bin/sh\necho cannot open the store; exit 1\n")
    binary.chmod(0o700)
    monkeypatch.setenv("LAKEFS_BIN", str(binary))
    with pytest.raises(ServiceError, match="cannot open the store"):
        local.up(tmp_path / "home", local.Wanted(prefect_port=(port := ports.free_port())))
    assert {part.state for part in local.status(tmp_path / "home")} == {"stopped"}
    assert ports.is_free(port)
