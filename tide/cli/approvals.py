"""Commands of the people who approve promotions: what waits, yes, no, and the key they sign with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from tide import wiring
from tide.approvals import answers as approval_answers
from tide.approvals import steps as approvals
from tide.approvals import text as approval_text
from tide.approvals.steps import Book, Waiting
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack
from tide.config import Settings
from tide.domain import Approval, ApprovalRequest
from tide.errors import ApprovalRefused
from tide.prefect_runs import PrefectRuns
from tide.serving.serving_file import candidate_on, read_signed_verdict
from tide.signatures import keys
from tide.signatures.attestation import check_verdict
from tide.store.base import Store

commands = typer.Typer()

RunId = Annotated[str, typer.Argument(help="Id of the run that waits, or its beginning; `tide approvals` lists them.")]
By = Annotated[str, typer.Option("--by", help="Your name, as the policy's approval.reviewers has it.")]
Why = Annotated[str, typer.Option("--why", help="Why; it stands in the ledger.")]
Key = Annotated[
    Path | None,
    typer.Option("--key", envvar="TIDE_REVIEWER_KEY_FILE", help="Your private key; the one of `tide reviewer-key`."),
]
Wait = Annotated[float, typer.Option("--wait", help="Seconds to wait for the run to say whether it counts; 0: none.")]
POLL_S = 0.5


@commands.command("approvals")
def list_approvals(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Promotions that wait for a person: since when, until when, for what gain, and who has agreed."""
    config = use_stack(home)
    found = approvals.waiting(wiring.store(config), config.drafts_repository)
    if as_json:
        print(json.dumps([{**item.model_dump(mode="json"), "approved_by": item.approved_by} for item in found]))
    else:
        print(approval_text.table(found, time.time()))


@commands.command()
def approve(run: RunId, by: By, why: Why, key: Key = None, wait: Wait = 60.0, home: Home = DEFAULT_HOME) -> None:
    """Agree to a promotion that waits, signed with your own key; exit 1 when that does not count."""
    _answer(home, run, "approve", by, why, key, wait)


@commands.command()
def refuse(run: RunId, by: By, why: Why, key: Key = None, wait: Wait = 60.0, home: Home = DEFAULT_HOME) -> None:
    """Refuse a promotion that waits, signed with your own key; exit 1 when that does not count."""
    _answer(home, run, "refuse", by, why, key, wait)


@commands.command("reviewer-key")
def reviewer_key(
    name: Annotated[str, typer.Argument(help="The reviewer; a file of this name is made, or read again.")],
    home: Home = DEFAULT_HOME,
) -> None:
    """Make a reviewer's own Ed25519 key, and print its public half as the policy wants it."""
    path, key = keys.ensure(home, keys.reviewer(name))
    print(f"private key: {path}; it is yours alone, keep it on your own machine")
    print(f"for the policy file:\napproval:\n  reviewers:\n    {json.dumps(name)}: {json.dumps(key.public)}")


def require_approval(config: Settings, branch: str) -> None:
    """Hold a rollout by hand to the policy. Raises ApprovalRefused, SignatureRefused."""
    store, drafts = wiring.store(config), config.drafts_repository
    digest = candidate_on(store, drafts, branch)
    verdict = check_verdict(read_signed_verdict(store, drafts, branch, digest), digest, wiring.trusted(config))
    loopback = approval_answers.is_loopback(os.environ.get("PREFECT_API_URL", ""))
    approvals.require(store, drafts, verdict, config.policy().approval, loopback=loopback)


def _answer(
    home: Path, run: str, decision: Literal["approve", "refuse"], by: str, why: str, key: Path | None, wait: float
) -> None:
    if not by.strip() or not why.strip():
        raise ApprovalRefused("a name (--by) and a reason (--why) are needed; nothing changed")
    config = use_stack(home)
    store, runs = wiring.store(config), PrefectRuns.from_environment()
    book = approvals.read(store, config.drafts_repository)
    request = _waiting(book, run)
    form = _form(request, decision, by, why, key or _own_key(home, by))
    if not form["signed"]:
        print("not signed: no key of yours is here (`tide reviewer-key`); it counts only where policy allows that")
    if (state := runs.run(request.run)).type != "PAUSED":
        raise ApprovalRefused(f"run {request.run} is {state.state}, not suspended: nothing changed; try again shortly")
    runs.resume(request.run, form)
    print(f"run {request.run} has your answer on {request.candidate[:12]}")
    if wait > 0:
        _report(store, config.drafts_repository, request, len(book.answers_to(request)), time.monotonic() + wait)


def _waiting(book: Book, run: str) -> ApprovalRequest:
    """The request of a run that waits; raises ApprovalRefused, saying what became of it."""
    mine = [r for r in book.requests if r.run.startswith(run)] if run else []
    if not mine:
        raise ApprovalRefused(f"no run {run!r} has asked for approval; `tide approvals` lists what waits")
    if len({r.run for r in mine}) > 1:
        raise ApprovalRefused(f"{run!r} begins the ids of several runs: {', '.join(sorted({r.run for r in mine}))}")
    request = mine[-1]
    if ended := book.end_of(request):
        when = approval_text.moment(ended.at)
        raise ApprovalRefused(f"run {request.run}: {ended.outcome} at {when}: {'; '.join(ended.reasons)}; too late")
    if time.time() >= request.expires_at:
        over = approval_text.moment(request.expires_at)
        raise ApprovalRefused(f"run {request.run}: timeout: its time was over at {over}; nothing changed")
    return request


def _own_key(home: Path, by: str) -> Path | None:
    """The key that `tide reviewer-key` made for a reviewer, if it lies here."""
    path = keys.locate(home, keys.reviewer(by.strip()))
    return path if path.exists() else None


def _form(
    request: ApprovalRequest, decision: Literal["approve", "refuse"], by: str, why: str, key: Path | None
) -> dict[str, str]:
    """The form, signed when there is a key."""
    said = Approval(
        run=request.run,
        verdict=request.verdict,
        candidate=request.candidate,
        incumbent=request.incumbent,
        decision=decision,
        reviewer=by.strip(),
        reason=why.strip()[: approval_answers.KEPT_CHARACTERS],
        at=time.time(),
    )
    signed = keys.read(key).sign("approval", said).to_json() if key else ""
    return {"decision": decision, "reviewer": said.reviewer, "reason": said.reason, "signed": signed}


def _report(store: Store, repository: str, request: ApprovalRequest, round: int, deadline: float) -> None:
    """Wait for what the run makes of the answer, and say it."""
    told = "the run has not looked at it yet; `tide approvals` and the ledger tell"
    while time.monotonic() < deadline:
        book = approvals.read(store, repository)
        answers, ended = book.answers_to(request), book.end_of(request)
        if (given := answers[round:]) and given[0].problems:
            raise ApprovalRefused(f"it does not count: {'; '.join(given[0].problems)}; the run asks again")
        if ended is not None:
            told = f"{ended.outcome}: {'; '.join(ended.reasons)}"
            break
        if given:
            agreed = Waiting(request=request, answers=answers).approved_by
            told = f"{len(agreed)} of {request.approvers} approvals"
            if given[0].decision == "approve" and len(agreed) < request.approvers:
                break
        time.sleep(POLL_S)
    print(told)
