"""What a person sees in the real Prefect UI, by a headless browser: deployments, the verdict, the approval form."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Page, expect

from infra import local, ports, prefect, processes
from tests.support.browser import WAIT_MS, chromium, open_page
from tide import verdict_text
from tide.domain import Verdict

expect.set_options(timeout=WAIT_MS)
VERDICT = Path(__file__).parents[1] / "fixtures" / "records" / "v1" / "Verdict-verdict.json"
WAITS: tuple[str, dict[str, Any]] = ("ask/ask", {"verdict": str(VERDICT)})
"""Deployment whose run waits for a person, and its parameters."""
FLOWS = """
from pathlib import Path
from typing import Literal
from prefect import flow
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from tasks.evaluate import publish_verdict
from tide.domain import Verdict

class Approval(RunInput):
    decision: Literal["approve", "refuse"]
    reviewer: str
    reason: str

@flow(name="ask")
def ask(verdict: str) -> str:
    publish_verdict(Verdict.model_validate_json(Path(verdict).read_bytes()))
    given = suspend_flow_run(wait_for_input=Approval, key="approval", timeout=900)
    return f"{given.decision} by {given.reviewer}"
"""
ASK = {
    "name": "ask",
    "entrypoint": "ui_flows.ask",
    "work_pool": {"name": "cpu", "job_variables": {"command": "python -m prefect.engine"}},
}


@dataclass(frozen=True)
class Rig:
    """A Prefect server with every deployment of prefect.yaml, one worker, and a run that waits for a person."""

    port: int
    run: str

    @property
    def url(self) -> str:
        return f"http://{ports.HOST}:{self.port}"

    def state(self) -> str:
        return str(_call(self.port, "GET", f"flow_runs/{self.run}")["state"]["name"])

    def wait(self, *states: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while (found := self.state()) not in states:
            assert found not in ("Failed", "Crashed"), found
            assert time.monotonic() < deadline, f"still {found} after {seconds} s"
            time.sleep(0.5)


def _call(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = httpx.request(method, f"{prefect.api_url(port)}/{path}", json=body, timeout=30, trust_env=False)
    return answer.raise_for_status().json()


@pytest.fixture(scope="module")
def browser() -> Path:
    """Asked for first: without one no server is started."""
    return chromium()


@pytest.fixture(scope="module")
def rig(browser: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    del browser
    home, code, port = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("code"), ports.free_port()
    (code / "ui_flows.py").write_text(FLOWS)
    content = yaml.safe_load(prefect.PREFECT_FILE.read_text())
    content["deployments"].append(ASK)
    (code / "prefect.yaml").write_text(yaml.safe_dump(content))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code), *sys.path])}
    try:
        server = prefect.launch_server(home, port)
        prefect.wait_server(server, port, print)
        prefect.create_pools(port)
        worker = prefect.launch_worker(home, port, "cpu", env)
        prefect.deploy(home, port, env, code / "prefect.yaml")
        prefect.wait_worker(worker, port, "cpu", print)
        deployment = _call(port, "GET", f"deployments/name/{WAITS[0]}")["id"]
        body = {"parameters": WAITS[1], "state": {"type": "SCHEDULED"}}
        found = Rig(port, _call(port, "POST", f"deployments/{deployment}/create_flow_run", body)["id"])
        found.wait("Suspended")
        yield found
    finally:
        processes.stop_all(home, local.STOP_ORDER, grace_s=10)


@pytest.fixture
def page(browser: Path, tmp_path: Path) -> Iterator[Page]:
    with open_page(browser, tmp_path) as opened:
        yield opened


def test_every_deployment_of_prefect_yaml_is_listed(rig: Rig, page: Page) -> None:
    page.goto(f"{rig.url}/deployments")
    names = [str(d["name"]) for d in yaml.safe_load(prefect.PREFECT_FILE.read_text())["deployments"]]
    assert {"adapt", "harvest", "train", "promote", "rollback"} <= set(names)
    for name in names:
        expect(page.get_by_role("link", name=name, exact=True).first).to_be_visible()


def test_the_verdict_is_there_to_read_with_its_table(rig: Rig, page: Page) -> None:
    verdict = Verdict.model_validate_json(VERDICT.read_bytes())
    page.goto(f"{rig.url}/artifacts/key/verdict")
    heading = f"{verdict.outcome}: {verdict.candidate[:12]} against {verdict.incumbent[:12]}"
    expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.get_by_role("columnheader", name="incumbent")).to_be_visible()
    expect(page.get_by_text(verdict_text.sentence(verdict)[:40])).to_be_visible()


def test_the_approval_form_asks_for_its_fields_and_resumes_the_run(rig: Rig, page: Page) -> None:
    page.goto(f"{rig.url}/runs/flow-run/{rig.run}")
    page.get_by_role("button", name="Resume").first.click()
    form = page.get_by_role("dialog")
    for field in ("decision", "reviewer", "reason"):
        expect(form.get_by_text(field, exact=False).first).to_be_visible()
    form.get_by_role("textbox").nth(0).fill("ann")
    assert rig.state() == "Suspended"
