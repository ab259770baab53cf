"""A whole pipeline to break: real lakeFS, real Prefect server and workers, the deployments of prefect.yaml.

Each part is a process of its own that can be killed and started again. The flows are the real ones, with the stand-ins
of `standins`; the spool is filled with real shard files.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from infra import ports, prefect, processes
from infra.lakefs.server import LakefsServer
from infra.processes import ManagedProcess
from tests.support import drilled_names as names
from tests.support.harvested import Delivered
from tests.support.spooled import START, WINDOW_S, add_segment, add_shard
from tide.domain import Split, split_of
from tide.files import write_durably
from tide.states.spool import window_of
from tide.store.lakefs import LakefsStore

SERVICE, REPLICAS = "drill", ("r0", "r1")
BEAT_S = 30
"""Prefect's least."""
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
IMPATIENT = {"silent_s": 1, "second_look_s": 0, "pending_s": 1, "ended_s": 0, "scratch_s": 0}
"""For a reconcile when it is known that nothing healthy is at work."""


@dataclass
class Pipeline:
    """Everything of one home."""

    home: Path
    lakefs: LakefsServer
    port: int
    env: dict[str, str]
    server: ManagedProcess
    workers: dict[str, ManagedProcess] = field(default_factory=dict)
    good: Delivered = field(default_factory=Delivered)
    windows: int = 0
    """Windows filled so far."""
    seed: int = 0
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))
    """One for all calls: each new one would load certificates, which takes more of a core than what is watched."""

    @property
    def store(self) -> LakefsStore:
        """A client of lakeFS."""
        own = self.lakefs.credentials
        return LakefsStore(self.lakefs.endpoint, own.access_key, own.secret_key)

    # The spool

    def fill(self) -> None:
        """One more window: training requests, and enough gate requests for a verdict."""
        begin = START + self.windows * WINDOW_S
        self.windows += 1
        spool, at = self.home / "spool", begin + 10
        train, gate = self._conversations(Split.TRAIN, 4), self._conversations(Split.GATE, 25)
        shards = [add_shard(spool, *train, at=at), add_shard(spool, *gate, at=at + 1, split=Split.GATE)]
        add_segment(spool, *train, *gate, at=at + 2)
        self.good.shards |= {shard.name for shard in shards}
        self.good.requests |= {f"{seed:064x}" for seed in (*train, *gate)}
        self.good.windows[f"{window_of(begin, WINDOW_S)}/{REPLICAS[0]}"] += 1
        self._remember()

    def _remember(self) -> None:
        """What was put into the spool, for a drill that goes on later on the same home."""
        known = {
            "windows": self.windows,
            "seed": self.seed,
            "shards": sorted(self.good.shards),
            "requests": sorted(self.good.requests),
            "delivered": dict(self.good.windows),
        }
        write_durably(self.home / "delivered.json", json.dumps(known).encode())

    def recall(self) -> None:
        """Go on after an earlier drill on this home."""
        if (file := self.home / "delivered.json").exists():
            known = json.loads(file.read_text())
            self.windows, self.seed = known["windows"], known["seed"]
            self.good.shards, self.good.requests = set(known["shards"]), set(known["requests"])
            self.good.windows.update(known["delivered"])

    def _conversations(self, split: Split, number: int) -> list[int]:
        found: list[int] = []
        while len(found) < number:
            self.seed += 1
            if split_of(f"{self.seed:08x}") is split:
                found.append(self.seed)
        return found

    # Prefect

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call of the API; SQLite is locked for moments under load."""
        for _ in range(20):
            answer = self.client.request(method, f"{prefect.api_url(self.port)}/{path}", json=body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(0.5)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def run(self, deployment: str, **parameters: Any) -> str:
        """Start a run; returns its id."""
        id = self.call("GET", f"deployments/name/{deployment}")["id"]
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.call("POST", f"deployments/{id}/create_flow_run", body)["id"])

    def state(self, run: str) -> str:
        """Type of a run's state."""
        return str(self.call("GET", f"flow_runs/{run}")["state"]["type"])

    def finished(self, run: str, timeout_s: float = 300.0) -> str:
        """Wait for a run's end; returns the type of its last state, or of the one it hangs in."""
        wait_for(lambda: self.state(run) in FINAL, timeout_s)
        return self.state(run)

    def at_work(self) -> list[dict[str, Any]]:
        """Runs that hold slots."""
        states = {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}
        found: list[dict[str, Any]] = self.call("POST", "flow_runs/filter", {"flow_runs": {"state": states}})
        return found

    def waiting(self) -> list[dict[str, Any]]:
        """Runs that are to begin."""
        body = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]}}}}
        found: list[dict[str, Any]] = self.call("POST", "flow_runs/filter", body)
        return found

    def slots(self) -> dict[str, int]:
        """Slots taken, by limit."""
        return {limit["name"]: limit["active_slots"] for limit in self.call("POST", "v2/concurrency_limits/filter", {})}

    # Breaking it

    def start_worker(self, pool: str) -> None:
        """Start the worker of a pool and wait for it."""
        told = {name: value for name, value in self.env.items() if name != "TIDE_SIGNING_KEY_FILE"}
        worker = prefect.launch_worker(self.home, self.port, pool, told, die_with_parent=True)
        prefect.wait_worker(worker, self.port, pool, print)
        self.workers[pool] = worker

    def kill_worker(self, pool: str) -> None:
        """SIGKILL the worker of a pool alone; its flows go on, which carry its token and would end with its record."""
        worker = self.workers.pop(pool)
        kill(worker.record.pid)
        if worker.child is not None:
            worker.child.wait(60)
        processes.record_path(self.home, worker.name).unlink(missing_ok=True)

    def start_server(self) -> None:
        """Start Prefect's server again."""
        self.server = prefect.launch_server(self.home, self.port, die_with_parent=True)
        prefect.wait_server(self.server, self.port, print)

    def kill_server(self) -> None:
        """SIGKILL Prefect's server and what it started."""
        for process in psutil.Process(self.server.record.pid).children(recursive=True):
            kill(process.pid)
        kill(self.server.record.pid)
        self.server.stop(0)
        ports.wait_free(self.port, 20)

    def kill_store(self) -> None:
        """SIGKILL lakeFS and start it again on its folder."""
        process = self.lakefs.process
        assert process is not None
        assert process.child is not None
        os.kill(process.record.pid, signal.SIGKILL)
        process.child.wait(60)
        self.lakefs.start()

    def flows(self) -> dict[str, psutil.Process]:
        """Processes that run a flow, by the id of the run: of a worker that lives, or that was killed."""
        found = {}
        for process in flow_processes(self.home):
            with suppress(psutil.Error):
                found[process.environ()["PREFECT__FLOW_RUN_ID"]] = process
        return found

    def trainers(self) -> list[psutil.Process]:
        """Processes of trainings."""
        found = []
        for process in psutil.process_iter():
            try:
                folder = Path(process.cwd())
            except (psutil.Error, OSError):
                continue
            if self.home / "train" in folder.parents:
                found.append(process)
        return found

    def restart_replica(self, name: str) -> None:
        """A replica dies and starts again: it serves what the drafts' marker says, as SGLang's plugin does."""
        marker = self.home / "drafts" / "serving"
        (self.home / "replicas" / name).write_text(marker.read_text().strip() if marker.exists() else "none")

    # What happened

    def boundaries(self) -> list[str]:
        """Lines of the log of step boundaries so far."""
        file = self.home / names.LOG
        return file.read_text().splitlines() if file.exists() else []

    def trainings(self) -> list[dict[str, Any]]:
        """What the stand-in trainer logged."""
        file = self.home / "trainings.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def flow_processes(home: Path) -> list[psutil.Process]:
    """Processes that run a flow of this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if "prefect.engine" in process.cmdline() and process.environ().get("TIDE_HOME") == str(home):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until something is true; False when it was not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
