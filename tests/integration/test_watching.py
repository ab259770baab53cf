"""`tide status` and `tide metrics` as processes, over a real lakeFS: what they read, and that they end well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass

import httpx
import pytest

from infra import ports
from infra.lakefs.server import LakefsServer
from tests.support.approving import REQUEST
from tests.support.signed import verdict_on
from tests.unit.test_ledger_tail import drift
from tide import repositories
from tide.approvals import steps as approvals
from tide.lineage import ledger
from tide.store.lakefs import LakefsStore

DRAFT = "d" * 64


@dataclass(frozen=True)
class Service:
    """A service with a ledger, a spool and a replica that is down."""

    store: LakefsStore
    repository: str
    env: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tide.cli", *arguments]
        return subprocess.Popen(argv, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=120)
        assert not errors, errors
        return process.returncode, output


@pytest.fixture(scope="module")
def service(lakefs_server: LakefsServer, tmp_path_factory: pytest.TempPathFactory) -> Service:
    home, keys, name = tmp_path_factory.mktemp("home"), lakefs_server.credentials, f"w{uuid.uuid4().hex[:8]}"
    (home / "spool" / "train").mkdir(parents=True)
    store = LakefsStore(lakefs_server.endpoint, keys.access_key, keys.secret_key)
    repository = f"{name}-drafts"
    repositories.ensure_drafts(store, repository)
    ledger.append(store, repository, "drift", drift(rate=0.41, expected_rate=0.45))
    ledger.append(store, repository, "verdict", verdict_on(DRAFT), attachments={".html": b"<html>"})
    approvals.ask(store, repository, REQUEST)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIDE_", "PREFECT_"))}
    env = {
        **kept,
        "TIDE_HOME": str(home),
        "TIDE_SERVICE": name,
        "TIDE_LAKEFS_ENDPOINT": lakefs_server.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": keys.access_key,
        "TIDE_LAKEFS_SECRET_KEY": keys.secret_key,
        "TIDE_REPLICAS": f"r0=http://127.0.0.1:{ports.free_port()}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return Service(store, repository, env)


def test_status_reads_the_ledger_of_a_real_lakefs_and_names_the_replica_that_is_down(service: Service) -> None:
    code, text = service.run("status")
    assert code == 0
    assert "rate 0.410 now, 0.450 baseline" in text
    assert f"promotion of draft {REQUEST.candidate[:12]}" in text
    assert f"tide approve {REQUEST.run}" in text
    assert "r0           UNREACHABLE" in text
    assert "\x1b" not in text, "no terminal, no colours"


def test_a_watch_redraws_until_it_is_interrupted_and_ends_well(service: Service) -> None:
    with service.start("status", "--watch", "0.5", "--json") as process:
        assert process.stdout is not None
        screens = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert screens[1]["at"] > screens[0]["at"]
    assert screens[0]["errors"] == {}
    assert [h["kind"] for h in screens[0]["last"]] == ["verdict", "drift"]
    assert not screens[0]["replicas"][0]["reachable"]


def test_the_exporter_serves_what_the_ledger_holds_and_ends_well(service: Service) -> None:
    port = ports.free_port()
    with service.start("metrics", "--port", str(port)) as process:
        found = scraped(port)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert found['tide_cycles_total{decision="none"}'] == 1
    assert found['tide_verdicts_total{outcome="promote"}'] == 1
    assert found['tide_up{source="replica:r0"}'] == 0
    assert found["tide_approvals_waiting"] == 1


def scraped(port: int) -> dict[str, float]:
    """Samples of the exporter's page by their text, once it answers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60, trust_env=False).text
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
