"""What a person sees in the real Prefect UI, by a headless browser, and what a worker gets; the server has a password.

One server for all of it: deployments, the verdict and the approval form; the closed API; secrets that reach a flow by
their block and show nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect

from infra import prefect, prefect_access
from tests.support import closed_prefect
from tests.support.browser import WAIT_MS, chromium, open_page
from tests.support.closed_prefect import PASSWORD, ClosedPrefect
from tide import verdict_text
from tide.domain import Verdict
from tide.errors import ServiceError

expect.set_options(timeout=WAIT_MS)
VERDICT = Path(__file__).parents[1] / "fixtures" / "records" / "v1" / "Verdict-verdict.json"
WAITS: tuple[str, dict[str, Any]] = ("ask/ask", {"verdict": str(VERDICT)})
"""Deployment whose run shows a verdict and waits for a person, and its parameters."""
FIELDS = ("Decision", "Reviewer", "Reason")
"""Of the form that it waits with, as the UI writes them."""
SECRET = "s3ntinel-of-the-store"
FLOWS = """
import hashlib, os
from pathlib import Path
from typing import Literal
from prefect import flow
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from tide.config import Settings

class Approval(RunInput):
    decision: Literal["approve", "refuse"]
    reviewer: str
    reason: str

@flow(name="ask")
def ask(verdict: str) -> None:
    from tasks.evaluate import publish_verdict
    from tide.domain import Verdict
    publish_verdict(Verdict.model_validate_json(Path(verdict).read_bytes()))
    given = suspend_flow_run(wait_for_input=Approval, key="approval", timeout=900)
    print(given.decision, "by", given.reviewer)

@flow(name="keyed", log_prints=True)
def keyed(out: str) -> None:
    config = Settings()
    print("settings", config, config.model_dump())
    found = config.lakefs_secret_key.get_secret_value()
    Path(out).write_text(hashlib.sha256(found.encode()).hexdigest() + os.environ["TIDE_SERVICE"])
"""
DIRECT = {"command": "python -m prefect.engine"}
DEPLOYMENTS: list[dict[str, Any]] = [
    {"name": "ask", "entrypoint": "ui_flows.ask", "work_pool": {"name": "cpu", "job_variables": DIRECT}},
    {
        "name": "keyed",
        "entrypoint": "ui_flows.keyed",
        "work_pool": {"name": "cpu", "job_variables": {**DIRECT, "env": {"TIDE_SERVICE": "of-the-deployment"}}},
    },
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedPrefect]:
    home, code = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("code")
    with closed_prefect.running(home, code, {"ui_flows": FLOWS}, DEPLOYMENTS) as running:
        yield running


# The closed API, and secrets


def test_without_the_password_the_api_says_no_and_health_says_yes(server: ClosedPrefect) -> None:
    assert server.call("GET", "health", auth=False).status_code == 200
    for path in ("work_pools/cpu", "admin/settings", "deployments/name/adapt/adapt"):
        assert server.call("GET", path, auth=False).status_code == 401
    assert server.call("GET", "deployments/name/adapt/adapt").status_code == 200


def test_our_own_calls_without_the_password_fail_by_name(
    server: ClosedPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(prefect_access.SERVER_AUTH)
    with pytest.raises(ServiceError, match="401"):
        prefect.create_pools(server.port)


def test_a_secret_reaches_the_flow_by_its_block_and_shows_nowhere(server: ClosedPrefect, tmp_path: Path) -> None:
    """`tide secrets push` and `tide run` with the password of the stack's own file; the worker had no key before."""
    pushed = server.tide("secrets", "push", "--pool", "cpu", TIDE_LAKEFS_SECRET_KEY=SECRET, TIDE_SERVICE="svc")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    assert "block secret/svc-lakefs-secret-key" in pushed.stdout
    done = server.tide("run", "keyed", "--param", f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = hashlib.sha256(SECRET.encode()).hexdigest() + "of-the-deployment"
    assert (tmp_path / "out").read_text() == expected, "the deployment's own environment is kept beside the pool's"
    logs = server.call("POST", "logs/filter", {"limit": 200}).text
    assert "settings" in logs
    shown = [pushed.stdout, done.stdout, done.stderr, logs, *everything(server)]
    assert not any(SECRET in text or PASSWORD.partition(":")[2] in text for text in shown)


def everything(server: ClosedPrefect) -> Iterator[str]:
    """What the server tells of deployments, runs, pools and blocks, and all of its home but the stack's own file."""
    for path in ("deployments/name/keyed/keyed", "work_pools/cpu"):
        yield server.call("GET", path).raise_for_status().text
    for path in ("flow_runs/filter", "block_documents/filter", "artifacts/filter", "events/filter"):
        yield server.call("POST", path, {}).raise_for_status().text
    for path in server.home.rglob("*"):
        if path.is_file() and path.name != "stack.env":
            yield path.read_bytes().decode(errors="replace")


# The pages


@pytest.fixture(scope="module")
def page(server: ClosedPrefect, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser whose user has given the password."""
    with open_page(chromium(), tmp_path_factory.mktemp("browser")) as opened:
        opened.goto(f"{server.url}/login?redirect=/deployments")
        opened.locator("input[type=password]").fill(PASSWORD)
        opened.locator("input[type=password]").press("Enter")
        expect(opened.get_by_text("Work Pools").first).to_be_visible()
        yield opened


@pytest.fixture(scope="module")
def waiting(server: ClosedPrefect, page: Page) -> str:
    """A run that waits for a person; not started where there is no browser to look at it."""
    del page
    run = server.start(*WAITS)
    server.wait(run, "Suspended")
    return run


def test_every_deployment_of_prefect_yaml_is_listed(server: ClosedPrefect, page: Page) -> None:
    page.goto(f"{server.url}/deployments")
    names = [str(d["name"]) for d in yaml.safe_load(prefect.PREFECT_FILE.read_text())["deployments"]]
    assert {"adapt", "harvest", "train", "promote", "rollback"} <= set(names)
    for name in names:
        # The link of a deployment has its flow's name below its own.
        expect(page.get_by_role("link", name=name).first).to_be_visible()


def test_the_verdict_of_a_run_is_there_to_read_with_its_table(server: ClosedPrefect, page: Page, waiting: str) -> None:
    verdict = Verdict.model_validate_json(VERDICT.read_bytes())
    page.goto(f"{server.url}/runs/flow-run/{waiting}")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_role("link", name="verdict").first.click()
    heading = f"{verdict.outcome}: {verdict.candidate[:12]} against {verdict.incumbent[:12]}"
    expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.get_by_role("columnheader", name="incumbent")).to_be_visible()
    expect(page.get_by_text(verdict_text.sentence(verdict)[:40])).to_be_visible()


def test_the_approval_form_asks_again_for_what_is_missing_and_resumes_the_run(
    server: ClosedPrefect, page: Page, waiting: str
) -> None:
    page.goto(f"{server.url}/runs/flow-run/{waiting}")
    page.get_by_role("button", name="Resume").first.click()
    form = page.get_by_role("dialog")
    for field in FIELDS:
        expect(form.get_by_text(field, exact=True)).to_be_visible()
    form.get_by_role("button", name="Submit").click()
    for field in FIELDS:
        expect(form.get_by_text(f"'{field.lower()}' is a required property")).to_be_visible()
    assert server.state(waiting) == "Suspended", "an incomplete form neither resumes nor fails the run"
    for field, text in (("Reviewer", "ann"), ("Reason", "it is better")):
        form.locator(".schema-form-property", has_text=field).get_by_role("textbox").fill(text)
    choose(page, form, "approve")
    form.get_by_role("button", name="Submit").click()
    server.wait(waiting, "Completed")


def choose(page: Page, form: Any, option: str) -> None:
    """Pick from the form's list, which opens by key."""
    control = form.locator(".p-select-button__control")
    control.focus()
    control.press("ArrowDown")
    page.get_by_text(option, exact=True).last.click()
