"""What a person sees in the real Prefect UI, by a headless browser, and what a worker gets; the server has a password.

One server for all of it: deployments, the verdict and the approval form of the promote flow; the closed API; and the
store's secret, which reaches flows by a Prefect block alone and shows nowhere. Judging and the rollout on replicas are
stood in for, see tests/support/approval_flows.py.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Locator, Page, expect

from infra import prefect, prefect_access
from infra.lakefs.server import LakefsServer
from tests.support import closed_prefect
from tests.support.browser import WAIT_MS, chromium, open_page
from tests.support.closed_prefect import PASSWORD, ClosedPrefect
from tests.support.signed import verdict_on
from tide import repositories
from tide.config import ApprovalPolicy, Policy
from tide.domain import LineageRecord
from tide.errors import ConfigError
from tide.promotion import verdict_text
from tide.serving.replicas import DRAFT_FILES
from tide.serving.serving_file import draft_prefix, read_serving
from tide.signatures import keys
from tide.store.lakefs import LakefsStore

expect.set_options(timeout=WAIT_MS)
SERVICE, CANDIDATE = "ui", "b" * 64
DRAFTS, BRANCH = f"{SERVICE}-drafts", "candidate-ui"
FIELDS = {"Decision": "approve", "Reviewer": "ada", "Reason": "it is better"}
"""Of the form, as the UI writes them, and what a person fills in."""
FLOWS = """
import hashlib, os
from pathlib import Path
from prefect import flow
from tests.support.approval_flows import install
from tide.config import Settings

promote = install()

@flow(name="keyed", log_prints=True)
def keyed(out: str) -> None:
    config = Settings()
    print("settings", config, config.model_dump())
    found = config.lakefs_secret_key.get_secret_value()
    Path(out).write_text(hashlib.sha256(found.encode()).hexdigest() + os.environ["TIDE_SERVICE"])
"""
DIRECT = {"command": "python -m prefect.engine"}
DEPLOYMENTS: list[dict[str, Any]] = [
    {"name": "ui", "entrypoint": "ui_flows.promote", "work_pool": {"name": "cpu", "job_variables": DIRECT}},
    {
        "name": "keyed",
        "entrypoint": "ui_flows.keyed",
        "work_pool": {"name": "cpu", "job_variables": {**DIRECT, "env": {"TIDE_SERVICE": "of-the-deployment"}}},
    },
]


@dataclass(frozen=True)
class Rig:
    """A closed Prefect, whose worker has no secret of the store, and a candidate that policy wants a person for."""

    server: ClosedPrefect
    store: LakefsStore
    pushed: str
    """What `tide secrets push` printed."""
    secret: str = field(repr=False)


@pytest.fixture(scope="module")
def rig(lakefs_server: LakefsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    home, code = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("code")
    access, (key_file, key) = lakefs_server.credentials, keys.ensure(home)
    store = LakefsStore(lakefs_server.endpoint, access.access_key, access.secret_key)
    put_candidate(store)
    policy = Policy(approval=ApprovalPolicy(mode="manual", reviewers={"ada": key.public}))
    (home / "policy.yaml").write_text(yaml.safe_dump(policy.model_dump(mode="json")))
    env = {
        "TIDE_SERVICE": SERVICE,
        "TIDE_HOME": str(home),
        "TIDE_LAKEFS_ENDPOINT": lakefs_server.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": access.access_key,
        "TIDE_POLICY_FILE": str(home / "policy.yaml"),
        "TIDE_SIGNING_KEY_FILE": str(key_file),
        "TIDE_PUBLIC_KEYS": key.public,
    }
    with closed_prefect.running(home, code, {"ui_flows": FLOWS}, DEPLOYMENTS, env) as server:
        secret = {"TIDE_LAKEFS_SECRET_KEY": access.secret_key, "TIDE_SERVICE": SERVICE}
        pushed = server.tide("secrets", "push", "--pool", "cpu", **secret)
        assert (pushed.returncode, pushed.stderr) == (0, "")
        yield Rig(server, store, pushed.stdout, access.secret_key)


def put_candidate(store: LakefsStore) -> None:
    repositories.ensure_drafts(store, DRAFTS)
    store.create_branch(DRAFTS, BRANCH, "main")
    for name in DRAFT_FILES:
        store.put(DRAFTS, BRANCH, draft_prefix(CANDIDATE) + name, name.encode())
    store.commit(DRAFTS, BRANCH, "candidate", LineageRecord(kind="candidate", subject=CANDIDATE).to_metadata())


@pytest.fixture(scope="module")
def server(rig: Rig) -> ClosedPrefect:
    return rig.server


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
    with pytest.raises(ConfigError, match="wants a password: set PREFECT_API_AUTH_STRING"):
        prefect.create_pools(server.port)


def test_a_secret_reaches_the_flow_by_its_block_and_shows_nowhere(rig: Rig, tmp_path: Path) -> None:
    """`tide secrets push` and `tide run` with the password of the stack's own file; the worker had no key before."""
    assert f"block secret/{SERVICE}-lakefs-secret-key" in rig.pushed
    done = rig.server.tide("run", "keyed", "--param", f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = hashlib.sha256(rig.secret.encode()).hexdigest() + "of-the-deployment"
    assert (tmp_path / "out").read_text() == expected, "the deployment's own environment is kept beside the pool's"
    logs = rig.server.call("POST", "logs/filter", {"limit": 200}).text
    assert "settings" in logs
    shown = [rig.pushed, done.stdout, done.stderr, logs, *everything(rig.server)]
    assert not any(rig.secret in text or PASSWORD.partition(":")[2] in text for text in shown)


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
def page(server: ClosedPrefect) -> Iterator[Page]:
    """A browser whose user has given the password."""
    with open_page(chromium()) as opened:
        opened.goto(f"{server.url}/login?redirect=/deployments")
        opened.locator("input[type=password]").fill(PASSWORD)
        opened.locator("input[type=password]").press("Enter")
        expect(opened.get_by_text("Work Pools").first).to_be_visible()
        yield opened


@pytest.fixture(scope="module")
def waiting(server: ClosedPrefect, page: Page) -> str:
    """A run that waits for a person; not started where there is no browser to look at it."""
    del page
    run = server.start("promote/ui", {"branch": BRANCH})
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
    verdict = verdict_on(CANDIDATE)
    page.goto(f"{server.url}/runs/flow-run/{waiting}")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_role("link", name="verdict").first.click()
    heading = f"{verdict.outcome}: {verdict.candidate[:12]} against {verdict.incumbent[:12]}"
    expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.get_by_role("columnheader", name="incumbent")).to_be_visible()
    expect(page.get_by_text(verdict_text.sentence(verdict)[:40])).to_be_visible()


def test_the_approval_form_is_filled_in_and_the_draft_serves(rig: Rig, page: Page, waiting: str) -> None:
    page.goto(f"{rig.server.url}/runs/flow-run/{waiting}")
    page.get_by_role("button", name="Resume").first.click()
    form = page.get_by_role("dialog")
    # What it is about stands above the form: the question, and the verdict.
    for heading in (f"Serve draft {CANDIDATE[:12]} in place of none?", f"promote: {CANDIDATE[:12]} against none"):
        expect(form.get_by_role("heading", name=heading)).to_be_visible()
    for label, text in FIELDS.items():
        own = form.locator(".schema-form-property", has_text=label)
        expect(own.get_by_text(label).first).to_be_visible()
        own.get_by_role("textbox").fill(text)
    assert read_serving(rig.store, DRAFTS).generation == 0, "nothing serves before somebody agreed"
    submit(rig.server, waiting, form)
    rig.server.wait(waiting, "Completed")
    stable = read_serving(rig.store, DRAFTS).stable
    assert stable is not None
    assert stable.digest == CANDIDATE


def submit(server: ClosedPrefect, run: str, form: Locator) -> None:
    """Press the button until the server takes it: where its SQLite is locked the form stays open and says so."""
    for _ in range(6):
        form.get_by_role("button", name="Submit").click()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if server.state(run) != "Suspended":
                return
            time.sleep(0.5)
    pytest.fail(f"the form was not taken: {form.inner_text()}")
