"""`tide approvals`, `tide approve`, `tide refuse`, `tide reviewer-key`: what is sent, and what a person is told."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.fakes.memory_store import MemoryStore
from tests.support.approving import KEYS, POLICY, PROPOSAL, RUN
from tests.support.prefect_stub import PrefectStub, prefect_stub
from tide import cli, repositories, wiring
from tide.approvals import rules as approval_rules
from tide.approvals import steps as approvals
from tide.approvals.answers import Form, examine
from tide.config import ApprovalPolicy
from tide.domain import Approval, ApprovalRequest, Signed
from tide.signatures import keys
from tide.signatures.signing import TrustedKeys

DRAFTS = "svc-drafts"


class Desk:
    """A home, a ledger with one promotion that waits, and a Prefect in which its run is suspended."""

    def __init__(self, home: Path, store: MemoryStore, prefect: PrefectStub) -> None:
        self.home, self.store, self.prefect = home, store, prefect
        self.request = approval_rules.request_for(PROPOSAL, RUN, ["for a test"], POLICY, time.time())
        approvals.ask(store, DRAFTS, self.request)
        prefect.runs[RUN] = "PAUSED"
        prefect.on_resume = self.flow

    def flow(self, _run: str, form: dict[str, str]) -> None:
        """What the resumed run does with the form."""
        book = approvals.read(self.store, DRAFTS)
        earlier = book.answers_to(self.request)
        found = examine(Form(**form), self.request, POLICY, earlier, loopback=True, now=time.time())
        approvals.answer(self.store, DRAFTS, found)
        approvals.expire(self.store, DRAFTS, POLICY, loopback=True)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    store = MemoryStore()
    repositories.ensure_drafts(store, DRAFTS)
    monkeypatch.setattr(wiring, "store", lambda _: store)
    monkeypatch.setenv("TIDE_SERVICE", "svc")
    with prefect_stub() as prefect:
        monkeypatch.setenv("PREFECT_API_URL", prefect.url)
        yield Desk(tmp_path, store, prefect)


def tide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tide", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out + told.err


def answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, by: str = "ada"
) -> tuple[int, str]:
    flags = ("--by", by, "--why", "it is plausible", "--home", str(desk.home))
    return tide(monkeypatch, capsys, *arguments, *flags)


def with_key(desk: Desk, name: str, of: str = "") -> None:
    path = keys.locate(desk.home, keys.reviewer(name))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(KEYS[of or name].pem())


def test_an_approval_is_signed_over_run_verdict_and_decision_with_the_reviewers_own_key(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_key(desk, "ada")
    code, told = answer(desk, monkeypatch, capsys, "approve", RUN[:8])
    assert (code, "approved by ada" in told) == (0, True), told
    ((run, form),) = desk.prefect.forms
    said = TrustedKeys([KEYS["ada"].public]).open(Signed.model_validate_json(form["signed"]), "approval", Approval)
    assert (run, said.run, said.verdict, said.decision, said.reviewer, said.reason) == (
        RUN,
        RUN,
        desk.request.verdict,
        "approve",
        "ada",
        "it is plausible",
    )
    assert (said.candidate, said.incumbent) == (desk.request.candidate, desk.request.incumbent)
    assert abs(said.at - time.time()) < 60


def test_an_answer_that_decides_is_told_with_what_it_decided_though_that_is_recorded_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slowly(run: str, form: dict[str, str]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(approvals, "expire", lambda *_, **__: [])
            desk.flow(run, form)
        threading.Timer(1.0, approvals.expire, (desk.store, DRAFTS, POLICY), {"loopback": True}).start()

    desk.prefect.on_resume = slowly
    with_key(desk, "ada")
    assert "approved: approved by ada" in answer(desk, monkeypatch, capsys, "approve", RUN)[1]


def test_a_refusal_is_signed_too_and_ends_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_key(desk, "ada")
    code, told = answer(desk, monkeypatch, capsys, "refuse", RUN)
    assert (code, "refused: refused by ada: it is plausible" in told) == (0, True), told


def test_without_a_key_it_is_sent_unsigned_and_that_is_said(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = answer(desk, monkeypatch, capsys, "approve", RUN)
    assert (code, "not signed" in told, "(unverified)" in told) == (0, True, True)
    assert desk.prefect.forms[0][1]["signed"] == ""


def test_an_answer_that_does_not_count_is_an_error_that_says_why(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_key(desk, "ada", of="bob")
    code, told = answer(desk, monkeypatch, capsys, "approve", RUN)
    assert (code, "not by the key" in told) == (1, True)


def test_the_first_of_two_approvals_is_told_how_many_there_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = POLICY.model_copy(update={"approvers": 2})
    approvals.void(desk.store, DRAFTS, desk.request, "for a test", time.time())
    desk.request = approval_rules.request_for(PROPOSAL, RUN, ["two"], two, time.time())
    approvals.ask(desk.store, DRAFTS, desk.request)
    with_key(desk, "ada")
    code, told = answer(desk, monkeypatch, capsys, "approve", RUN)
    assert (code, "1 of 2 approvals" in told) == (0, True), told


def ended(desk: Desk) -> None:
    refusal = approval_rules.refusal(desk.request, "superseded", ["superseded: run x has a newer verdict"], time.time())
    approvals.settle(desk.store, DRAFTS, desk.request, refusal)


def over(desk: Desk) -> None:
    approvals.void(desk.store, DRAFTS, desk.request, "for a test", time.time())
    past: ApprovalRequest = desk.request.model_copy(
        update={"asked_at": desk.request.asked_at + 1e-3, "expires_at": time.time() - 1}
    )
    approvals.ask(desk.store, DRAFTS, past)


def running(desk: Desk) -> None:
    desk.prefect.runs[RUN] = "RUNNING"


def rejecting(desk: Desk) -> None:
    desk.prefect.rejects = "Reason: no such field"


def other_server(desk: Desk) -> None:
    desk.prefect.runs.clear()


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        (ended, "refused at .*superseded: run x"),
        (over, "timeout: its time was over"),
        (running, "Running, not suspended: nothing changed"),
        (rejecting, "did not take the answer: Reason: no such field; nothing changed"),
        (other_server, "has no flow_runs/"),
    ],
)
def test_an_approval_that_comes_too_late_or_too_early_is_told_so_and_changes_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], happened: object, said: str
) -> None:
    assert callable(happened)
    happened(desk)
    code, told = answer(desk, monkeypatch, capsys, "approve", RUN)
    assert code == 1
    assert desk.prefect.forms == []
    assert re.search(said, told), told


@pytest.mark.parametrize("run", ["", "ffffffff"])
def test_a_run_that_asked_nothing_is_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    code, told = answer(desk, monkeypatch, capsys, "approve", run)
    assert (code, f"no run {run!r} has asked" in told) == (1, True)


def test_a_name_and_a_reason_are_needed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = tide(monkeypatch, capsys, "approve", RUN, "--by", " ", "--why", "x", "--home", str(desk.home))
    assert (code, "--by" in told) == (1, True)


def test_what_waits_is_listed_for_people_and_for_programs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RUN in tide(monkeypatch, capsys, "approvals", "--home", str(desk.home))[1]
    (found,) = json.loads(tide(monkeypatch, capsys, "approvals", "--json", "--home", str(desk.home))[1])
    assert (found["request"]["run"], found["approved_by"]) == (RUN, [])


def test_a_reviewers_key_is_made_once_and_printed_as_the_policy_takes_it(tmp_path: Path) -> None:
    run = ["reviewer-key", "ada@example.org", "--home", str(tmp_path)]
    first, second = (CliRunner().invoke(cli.app, run).output for _ in range(2))
    assert first == second
    policy = ApprovalPolicy.model_validate(yaml.safe_load(first[first.index("approval:") :])["approval"])
    path = keys.locate(tmp_path, keys.reviewer("ada@example.org"))
    assert policy.reviewers == {"ada@example.org": keys.read(path).public}


@pytest.mark.parametrize("name", ["../signing", "", "a/b", "a" * 65])
def test_a_reviewer_whose_name_is_no_plain_one_gets_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, told = tide(monkeypatch, capsys, "reviewer-key", name, "--home", str(tmp_path))
    assert (code, "reviewer" in told) == (1, True)
    assert list(tmp_path.iterdir()) == []
