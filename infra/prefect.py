"""A Prefect server on loopback with its work pools, deployments and one process worker a pool.

Owns the server's folder ``<home>/prefect`` (SQLite) and the offline settings. Knows nothing of what the flows do. The
server is spoken to over HTTP and by Prefect's own command: importing Prefect here would freeze its settings too early.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from infra import automations, ports, prefect_access, processes, schedules
from infra.files import tail
from infra.processes import ManagedProcess, Report
from tide.errors import NotThere, ServiceError
from tide.recovery.rules import BEAT_S

SERVER = "prefect"
POOLS: dict[str, int | None] = {"cpu": None, "mi250": 1}
"""Work pools and how many runs each takes at once; one machine trains one draft at a time."""
PREFECT_FILE = Path(__file__).resolve().parent.parent / "prefect.yaml"
HEARTBEAT_S = BEAT_S
"""Seconds between heartbeats of the flows that workers of ours start."""
_DAY_S = 86400
_BOUNDED = {
    # An event takes 8 KB with its indexes, and each task run makes three. Heartbeats are of use for minutes, the others
    # are the feed that people look at; the ledger keeps the decisions.
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P3D",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": f'{{"prefect.flow-run.heartbeat": {_DAY_S}}}',
    # Off by default: without it runs, their logs and artifacts are kept for ever.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(14 * _DAY_S),
}
"""What keeps the server's database from growing for ever."""
_PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")


def worker_name(pool: str) -> str:
    """Name of the process that works for a pool."""
    return f"worker-{pool}"


def api_url(port: int) -> str:
    """Address of the API of a server on this machine."""
    return f"http://{ports.HOST}:{port}/api"


def environment(home: Path, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the server, its workers and its flows: the base without other Prefect settings, and ours.

    Leases lie in files: in memory they are lost with the server, and a slot that nobody gives back cancels every
    later run.
    """
    kept = {name: value for name, value in base.items() if not name.startswith("PREFECT_")}
    return (
        ports.without_proxy(kept)
        | prefect_access.client_settings(base)
        | {
            # A work pool's `python` is then this one, whatever the shell that typed `tide up` had first.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)]),
            "PREFECT_HOME": str(home.absolute() / "prefect"),
            "PREFECT_API_URL": api_url(port),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
            **_BOUNDED,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_LOGGING_COLORS": "false",
            "DO_NOT_TRACK": "1",
        }
    )


def launch_server(home: Path, port: int, *, host: str = ports.HOST, die_with_parent: bool = False) -> ManagedProcess:
    """Start the server without waiting for it.

    Raises:
        ServiceError: the port is busy, or a server runs for this home.
        ConfigError: others could reach it on that host, and it would be open.
    """
    prefect_access.require_closed(host, os.environ)
    ports.require_port(SERVER, port)
    (home / "prefect").mkdir(mode=0o700, parents=True, exist_ok=True)
    argv = [*_PREFECT, "server", "start", "--host", host, "--port", str(port)]
    env = environment(home, port, os.environ) | prefect_access.server_settings(host, os.environ)
    return processes.start(home, SERVER, argv, env=env, cwd=home, die_with_parent=die_with_parent)


def wait_server(server: ManagedProcess, port: int, report: Report, *, timeout_s: float = 180.0) -> float:
    """Wait until the API is healthy. Returns the seconds waited; raises ServiceError."""

    def healthy() -> bool:
        return ports.http_ok(f"{api_url(port)}/health") and server.listens(port)

    return server.wait_ready(healthy, timeout_s, report)


def create_pools(port: int, pools: Mapping[str, int | None] = POOLS) -> None:
    """Make the process work pools that do not exist yet.

    Raises:
        ServiceError: the server refused.
        ConfigError: it wants a password, or another one.
    """
    server = prefect_access.server_at(api_url(port))
    for name, limit in pools.items():
        try:
            server.call("GET", f"work_pools/{name}")
        except NotThere:
            server.call("POST", "work_pools/", {"name": name, "type": "process", "concurrency_limit": limit})


def deploy(home: Path, port: int, env: Mapping[str, str], prefect_file: Path = PREFECT_FILE) -> None:
    """Apply all deployments of ``prefect.yaml``. Takes seconds: it imports every flow. Schedules that are on stay on.

    Raises:
        ServiceError: the file is missing, a flow cannot be imported, or the server refused; has the end of the log.
        ConfigError: it wants a password, or another one.
    """
    if not prefect_file.is_file():
        raise ServiceError(f"deployments file {prefect_file} does not exist; run from a checkout of the repository")
    argv = [*_PREFECT, "deploy", "--all", "--prefect-file", str(prefect_file)]
    turned_on = schedules.active(api_url(port))
    log = home / "logs" / "deploy.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("wb") as output:
        done = subprocess.run(
            argv, env=environment(home, port, env), cwd=prefect_file.parent, stdout=output, stderr=output, check=False
        )
    if done.returncode:
        raise ServiceError(f"deployments of {prefect_file} were not applied; the end of {log}:\n{tail(log, 20)}")
    schedules.turn_on(api_url(port), turned_on)


def automate(port: int) -> list[str]:
    """Apply TIDE's automations; returns the names of those that were not there as they are now.

    Raises:
        ServiceError: deployments are missing, or the server refused.
        ConfigError: it wants a password, or another one.
    """
    return automations.apply(api_url(port))


def launch_worker(
    home: Path, port: int, pool: str, env: Mapping[str, str], *, die_with_parent: bool = False
) -> ManagedProcess:
    """Start the worker of a pool; its flows inherit ``env``. Raises ServiceError when one runs."""
    name = worker_name(pool)
    argv = [*_PREFECT, "worker", "start", "--pool", pool, "--name", name, "--type", "process"]
    env = environment(home, port, env)
    return processes.start(home, name, argv, env=env, cwd=home, die_with_parent=die_with_parent)


def wait_worker(worker: ManagedProcess, port: int, pool: str, report: Report, *, timeout_s: float = 120.0) -> float:
    """Wait until the server has heard of the worker. Returns the seconds waited; raises ServiceError, ConfigError."""
    server = prefect_access.server_at(api_url(port))

    def online() -> bool:
        try:
            heard = server.call("POST", f"work_pools/{pool}/workers/filter", {})
        except ServiceError:
            return False  # it is asked again until the time is up
        return any(_is_online(entry, worker) for entry in heard)

    return worker.wait_ready(online, timeout_s, report, poll_s=0.5)


def _is_online(worker: Mapping[str, str], process: ManagedProcess) -> bool:
    """True when the entry is this very worker's: the server remembers one of the same name from before."""
    heard = datetime.fromisoformat(worker["last_heartbeat_time"])
    started = datetime.fromisoformat(process.record.started_at)
    return worker["name"] == process.name and worker["status"] == "ONLINE" and heard >= started
