"""How the pipeline that a drill breaks is started and ended: servers, workers, deployments, settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from infra import local, ports, prefect, processes
from infra.lakefs.server import LakefsServer
from tests.support.drilled_names import PLAIN
from tests.support.operated import BEAT_S, REPLICAS, SERVICE, Pipeline, flow_processes, kill
from tide.signatures import keys

ROOT = Path(__file__).parents[2]
POLICY = {"gate_requests": 20, "drift": {"bootstrap_tokens": 10}, "canary": {"max_requests": 0}}
"""Without traffic there is nothing to watch a canary on; its swap is verified all the same."""


def deployments(folder: Path) -> Path:
    """prefect.yaml with the drilled flows in place of the real ones, all else as it is, and `plain_flows`."""
    content = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    for deployment in content["deployments"]:
        deployment["entrypoint"] = f"tests.support.drilled.{deployment['name']}"
    content["deployments"] += plain_deployments()
    path = folder / "prefect.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def plain_deployments() -> list[dict[str, Any]]:
    """Flows that do nothing, ours by their tag, one at a time each."""
    return [
        {
            "name": name,
            "entrypoint": f"tests.support.plain_flows.{name.replace('-', '_')}",
            "tags": ["tide"],
            "work_pool": {"name": "cpu", "job_variables": {"command": "python -m prefect.engine"}},
            "concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"},
        }
        for name in PLAIN
    ]


@contextmanager
def pipeline(home: Path, pools: tuple[str, ...] = ("cpu", "mi250"), *, train_s: float = 2.0) -> Iterator[Pipeline]:
    """Start everything; end it whatever happens."""
    usual, prefect.HEARTBEAT_S = prefect.HEARTBEAT_S, BEAT_S
    for folder in ("spool", "drafts", "replicas", "lakefs"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    port = ports.free_port()
    with LakefsServer(home / "lakefs", port=ports.free_port(), die_with_parent=True, ready_s=300) as lakefs:
        env = _environment(home, lakefs, train_s)
        try:
            server = prefect.launch_server(home, port, die_with_parent=True)
            prefect.wait_server(server, port, print)
            prefect.create_pools(port)
            made = Pipeline(home, lakefs, port, env, server)
            made.recall()
            prefect.deploy(home, port, env, deployments(home))
            for pool in pools:
                made.start_worker(pool)
            yield made
        finally:
            prefect.HEARTBEAT_S = usual
            processes.stop_all(home, local.STOP_ORDER, grace_s=10)
            for left in flow_processes(home):
                kill(left.pid)


def _environment(home: Path, lakefs: LakefsServer, train_s: float) -> dict[str, str]:
    signing, key = keys.ensure(home)
    policy = home / "params.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TIDE_SERVICE": SERVICE,
        "TIDE_HOME": str(home),
        "TIDE_POLICY_FILE": str(policy),
        "TIDE_LAKEFS_ENDPOINT": lakefs.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": lakefs.credentials.access_key,
        "TIDE_LAKEFS_SECRET_KEY": lakefs.credentials.secret_key,
        "TIDE_REPLICAS": ",".join(f"{name}=http://127.0.0.1:1" for name in REPLICAS),
        "TIDE_SPOOL": str(home / "spool"),
        "TIDE_DRAFT_DIR": str(home / "drafts"),
        "TIDE_PUBLIC_KEYS": key.public,
        "TIDE_SIGNING_KEY_FILE": str(signing),
        "DRILL_TRAIN_S": str(train_s),
    }
