"""Drill D6 on a real Prefect server and worker and a real lakeFS: approved wrongly, twice, too late, and overtaken.

Judging and the rollout on replicas are stood in for, see tests/support/approval_flows.py; all else is as it runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import local, ports, prefect, processes
from infra.lakefs.server import LakefsServer
from tests.support import approval_flows
from tide import repositories, wiring
from tide.approvals import steps as approvals
from tide.config import ApprovalPolicy, Policy
from tide.domain import LineageRecord, Promotion, Serving, Verdict
from tide.lineage import ledger, provenance
from tide.prefect_api import PrefectApi
from tide.prefect_runs import FINAL, PrefectRuns
from tide.serving.replicas import DRAFT_FILES
from tide.serving.serving_file import draft_prefix, read_serving
from tide.signatures import keys
from tide.store.lakefs import LakefsStore

A, B, C, D = (letter * 64 for letter in "abcd")
SERVICE = "approvals"
DRAFTS = f"{SERVICE}-drafts"
DEPLOYMENTS = """
name: test
pull: []
definitions:
  cpu: &cpu {name: cpu, job_variables: {command: python -m prefect.engine}}
deployments:
  - name: promote
    entrypoint: approval_deployments.promote
    work_pool: *cpu
    concurrency_limit: {limit: 1, collision_strategy: ENQUEUE}
  - name: cycle
    entrypoint: approval_deployments.cycle
    work_pool: *cpu
  - name: tidy
    entrypoint: approval_deployments.tidy
    work_pool: *cpu
"""
FLOWS = """
from tests.support.approval_flows import cycle, install, tidy

promote = install()
"""
PROFILE = """
active = "test"
[profiles.test]
PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS = "1"
"""
"""A run that must wait for its turn asks again in 1 s in place of 30."""


PATIENCE_S = 240.0
"""Seconds that a run may take to get where it should be; some 6 on an idle machine."""


class Service:
    """A store, a Prefect with one worker, and a reviewer."""

    def __init__(self, home: Path, port: int, env: Mapping[str, str], store: LakefsStore) -> None:
        self.home, self.port, self.env, self.store = home, port, env, store
        self.runs = PrefectRuns(prefect.api_url(port))
        self.reviewer = keys.ensure(home, keys.reviewer("ada"))[1]

    def write_policy(self, **changes: Any) -> None:
        approval = ApprovalPolicy(mode="manual", reviewers={"ada": self.reviewer.public}, **changes)
        text = yaml.safe_dump(Policy(approval=approval).model_dump(mode="json"))
        Path(self.env["TIDE_POLICY_FILE"]).write_text(text)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return PrefectApi(prefect.api_url(self.port)).call(method, path, body)

    def start(self, flow: str, **parameters: Any) -> str:
        deployment = self.call("GET", f"deployments/name/{flow}/{flow}")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}, "idempotency_key": uuid.uuid4().hex}
        return str(self.call("POST", f"deployments/{deployment['id']}/create_flow_run", body)["id"])

    def candidate(self, digest: str) -> str:
        branch = f"{repositories.CANDIDATE}{digest[:6]}"
        self.store.create_branch(DRAFTS, branch, "main")
        for name in DRAFT_FILES:
            self.store.put(DRAFTS, branch, draft_prefix(digest) + name, name.encode())
        record = LineageRecord(kind="candidate", subject=digest).to_metadata()
        self.store.commit(DRAFTS, branch, "candidate", record)
        return branch

    def wait(self, run: str, *types: str, round: int | None = None) -> None:
        """Wait until a run is in one of these states; with ``round``, until it asks for that form."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            state = self.call("GET", f"flow_runs/{run}")["state"]
            key = state["state_details"].get("pause_key") or ""
            if state["type"] in types and (round is None or key.endswith(f"-{round}")):
                return
            assert state["type"] not in FINAL, state
            time.sleep(0.2)
        pytest.fail(f"run {run} is {state['type']} {key}, not {types}, after {PATIENCE_S} s")

    def tide(self, command: str, run: str, **flags: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "tide.cli", command, run, "--by", "ada", "--home", str(self.home)]
        argv += [
            part
            for name, value in ({"why": "for a test", "wait": str(PATIENCE_S)} | flags).items()
            for part in (f"--{name}", value)
        ]
        done = subprocess.run(argv, env=dict(self.env), capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def book(self) -> approvals.Book:
        return approvals.read(self.store, DRAFTS)

    def serving(self) -> Serving:
        return read_serving(self.store, DRAFTS)

    def promotions(self) -> list[str]:
        return [p.draft for p in ledger.every(self.store, DRAFTS, "promotion", Promotion)]


@pytest.fixture(scope="module")
def service(lakefs_server: LakefsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home, port = tmp_path_factory.mktemp("home"), ports.free_port()
    code = tmp_path_factory.mktemp("code")
    (code / "prefect.yaml").write_text(DEPLOYMENTS)
    (code / "approval_deployments.py").write_text(FLOWS)
    (home / "prefect").mkdir(mode=0o700)
    (home / "prefect" / "profiles.toml").write_text(PROFILE)
    access, (key_file, key) = lakefs_server.credentials, keys.ensure(home)
    env = prefect.environment(home, port, os.environ) | {
        "TIDE_SERVICE": SERVICE,
        "TIDE_HOME": str(home),
        "TIDE_LAKEFS_ENDPOINT": lakefs_server.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": access.access_key,
        "TIDE_LAKEFS_SECRET_KEY": access.secret_key,
        "TIDE_POLICY_FILE": str(home / "policy.yaml"),
        "TIDE_SIGNING_KEY_FILE": str(key_file),
        "TIDE_PUBLIC_KEYS": key.public,
        "PYTHONPATH": os.pathsep.join([str(code), *sys.path]),
    }
    store = LakefsStore(lakefs_server.endpoint, access.access_key, access.secret_key)
    repositories.ensure_drafts(store, DRAFTS)
    try:
        server = prefect.launch_server(home, port)
        prefect.wait_server(server, port, print)
        prefect.create_pools(port)
        worker = prefect.launch_worker(home, port, "cpu", env)
        prefect.deploy(home, port, env, code / "prefect.yaml")
        prefect.wait_worker(worker, port, "cpu", print)
        yield Service(home, port, env, store)
    finally:
        processes.stop_all(home, local.STOP_ORDER, grace_s=10)


def causes(service: Service) -> list[tuple[str, str]]:
    book = service.book()
    return [(s.run, s.cause) for s in (*book.settled, *book.stale) if s.outcome == "refused"]


def serve_another(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's promotion, on the same store, while ours waits; it stands in no ledger of ours."""
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    wiring.settings.cache_clear()
    branch = service.candidate(A)
    proposal = approval_flows.judge(branch, "main")
    monkeypatch.setattr(approval_flows.ledger, "append", lambda *_, **__: "")
    assert approval_flows.roll_out(branch, A, proposal.generation)
    monkeypatch.undo()
    wiring.settings.cache_clear()


@pytest.mark.timeout(1200)
def test_whatever_people_do_there_is_one_promotion_every_refusal_is_recorded_and_no_run_fails(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.write_policy()
    first = service.start("promote", branch=service.candidate(B))
    service.wait(first, "PAUSED", round=0)
    _the_verdict_is_shown_with_the_form(service, first)

    # With a missing field: recorded, and asked again.
    service.runs.resume(first, {"decision": "approve", "reviewer": "ada"})
    service.wait(first, "PAUSED", round=1)
    (answer,) = service.book().answers
    assert answer.problems == ("reason: why is needed",)

    # A second cycle begins while the first waits: the first ends by itself, and one run comes of two starts.
    service.start("cycle", branch=service.candidate(C))
    service.wait(first, "COMPLETED")
    (second,) = {run.id for run in service.runs.of_flow("promote")} - {first}
    service.wait(second, "PAUSED", round=0)
    assert causes(service) == [(first, "superseded")]
    code, told = service.tide("approve", first)
    assert (code, "superseded" in told) == (1, True), told

    # The incumbent changes before the approval comes: judged again, and the new verdict needs one of its own.
    serve_another(service, monkeypatch)
    code, told = service.tide("approve", second)
    assert code == 0, told
    service.wait(second, "PAUSED", round=0)
    assert (service.promotions(), (second, "stale") in causes(service)) == ([], True)
    waiting = {w.request.run: w.request for w in approvals.waiting(service.store, DRAFTS)}
    assert waiting.keys() == {second}
    assert waiting[second].incumbent == A

    # Approved, and approved twice.
    code, told = service.tide("approve", second)
    assert (code, "approved by ada" in told) == (0, True), told
    service.wait(second, "COMPLETED")
    code, told = service.tide("approve", second)
    assert (code, "too late" in told) == (1, True), told

    # After the timeout.
    service.write_policy(timeout_s=6.0)
    third = service.start("promote", branch=service.candidate(D))
    service.wait(third, "PAUSED", round=0)
    (waits,) = approvals.waiting(service.store, DRAFTS)
    time.sleep(max(0.0, waits.request.expires_at - time.time()))
    code, told = service.tide("approve", third)
    assert (code, "timeout" in told) == (1, True), told
    service.start("tidy")
    service.wait(third, "COMPLETED")
    assert causes(service)[-2:] == [(third, "timeout"), (second, "stale")]

    # All of it.
    assert service.promotions() == [C]
    serving = service.serving()
    assert (serving.generation, serving.stable and serving.stable.digest) == (2, C)
    assert sorted(causes(service)) == sorted([(first, "superseded"), (second, "stale"), (third, "timeout")])
    assert [s.run for s in service.book().settled if s.outcome == "approved"] == [second, second]
    judged = [v.candidate for v in ledger.every(service.store, DRAFTS, approval_flows.JUDGED, Verdict)]
    assert judged.count(B) == 1, "what waits is not judged again when it is resumed"
    assert (judged.count(C), judged.count(D)) == (2, 1)
    assert approvals.waiting(service.store, DRAFTS) == []
    assert provenance.changes(service.store, DRAFTS)[-1].verdict_facts["approved_by"] == "ada"
    ended = {run.id: run.type for run in service.runs.of_flow("promote")}
    assert ended == dict.fromkeys((first, second, third), "COMPLETED")


def _the_verdict_is_shown_with_the_form(service: Service, run: str) -> None:
    state = service.call("GET", f"flow_runs/{run}")["state"]
    keyset = state["state_details"]["run_input_keyset"]
    described = service.call("GET", f"flow_runs/{run}/input/{keyset['description']}")
    assert re.search(r"Serve draft b{12} in place of none\?", described)
    assert "+0.340" in described
    schema = service.call("GET", f"flow_runs/{run}/input/{keyset['schema']}")
    assert set(schema["properties"]) == {"decision", "reviewer", "reason", "signed"}
    assert "required" not in schema
    artifacts = service.call("POST", "artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})
    assert "verdict" in {a["key"] for a in artifacts}
