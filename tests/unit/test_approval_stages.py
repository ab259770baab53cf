"""The stages of an approval: a run that starts from the top each time finds its place, and others find their end."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import approvals as stages
from tests.fakes.memory_store import MemoryStore
from tests.support.approving import POLICY, form, signed_form
from tests.support.signed import KEY, STRANGER, put_verdict, verdict_on
from tide import repositories, wiring
from tide.approvals import rules as approval_rules
from tide.approvals import steps as approvals
from tide.approvals.answers import Form
from tide.config import ApprovalPolicy, Policy, Settings
from tide.domain import (
    ApprovalAnswer,
    ApprovalRequest,
    ApprovalSettlement,
    LineageRecord,
    Proposal,
    Serving,
    ServingDraft,
    Verdict,
)
from tide.errors import ApprovalRefused, ConfigError, SignatureRefused
from tide.lineage import history, ledger
from tide.serving.serving_file import candidate_on
from tide.signatures.signing import TrustedKeys

DRAFTS = "svc-drafts"
A, B, C = "a" * 64, "b" * 64, "c" * 64
ONE, TWO = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"


class Suspended(Exception):
    """Stands for the end of the process that waits."""


class Rig:
    """A store, and a Prefect that keeps what a run was handed by the key of its suspension."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: ApprovalPolicy = POLICY) -> None:
        self.store, self.policy = MemoryStore(), policy
        self.run, self.forms, self.resumed = ONE, dict[tuple[str, str], Form](), list[str]()
        self.keys: list[str] = []
        self.loopback, self.suspendable = True, True
        self.states: dict[str, Any] = {}
        config = Settings(service="svc", home=tmp_path, _env_file=None)  # type: ignore[call-arg]
        monkeypatch.setattr(Settings, "policy", lambda _: Policy(approval=self.policy))
        for name, value in {
            "settings": lambda: config,
            "store": lambda _: self.store,
            "trusted": lambda _: TrustedKeys([KEY.public]),
        }.items():
            monkeypatch.setattr(wiring, name, value)
        stand_ins: dict[str, Any] = {
            "this_run": lambda: self.run,
            "form_for": self._form_for,
            "resume_suspended": self.resumed.extend,
            "api_on_loopback": lambda: self.loopback,
            "require_suspendable": self._require_suspendable,
            "state_of": self.states.get,
            "publish_verdict": lambda _: None,
            "get_run_logger": lambda: logging.getLogger("test"),
        }
        for name in ("request_approval", "settle_approval", "record_answer"):
            stand_ins[name] = getattr(stages, name).fn
        for name, value in stand_ins.items():
            monkeypatch.setattr(stages, name, value)
        repositories.ensure_drafts(self.store, DRAFTS)
        self._serve(Serving(generation=1, stable=ServingDraft(digest=A)))

    def _serve(self, serving: Serving) -> None:
        """As if a promotion had been merged; the draft in serving is one that was imported."""
        name = f"serve-{serving.generation}"
        assert serving.stable is not None
        self.store.create_branch(DRAFTS, name, "main")
        self.store.put(DRAFTS, name, "serving.json", serving.to_json().encode())
        self.store.commit(DRAFTS, name, name, {})
        self.store.merge(DRAFTS, name, "main", name, {})

    def serve(self, generation: int, digest: str, verdict: str | None = None) -> None:
        self._serve(Serving(generation=generation, stable=ServingDraft(digest=digest, verdict=verdict)))

    def _form_for(self, key: str, _description: str) -> Form:
        if (self.run, key) not in self.forms:
            self.keys.append(key)
            raise Suspended(key)
        return self.forms[self.run, key]

    def _require_suspendable(self) -> None:
        if not self.suspendable:
            raise ConfigError("cannot wait")

    def candidate(self, digest: str = B, incumbent: str = A, **options: Any) -> Proposal:
        branch = f"candidate-{digest[:4]}"
        self.store.create_branch(DRAFTS, branch, "main")
        record = LineageRecord(kind="candidate", subject=digest).to_metadata()
        self.store.put(DRAFTS, branch, "x", digest.encode())
        self.store.commit(DRAFTS, branch, "candidate", record)
        policy = Policy(approval=self.policy).digest()
        verdict = verdict_on(digest, incumbent).model_copy(update={"policy": policy} | options.pop("verdict", {}))
        put_verdict(self.store, DRAFTS, branch, verdict, **options)
        return Proposal(branch=branch, verdict=verdict, generation=1)

    def waits(self, proposal: Proposal, run: str = ONE) -> ApprovalRequest:
        """Start a run, or start it again, from the top: it ends suspended; the request that it waits with."""
        self.run = run
        with pytest.raises(Suspended):
            stages.await_approval(proposal)
        request = approvals.read(self.store, DRAFTS).of_run(run)
        assert request is not None
        return request

    def hand(self, filled: Form, run: str = ONE) -> None:
        self.forms[run, self.keys[-1]] = filled

    def again(self, proposal: Proposal, run: str = ONE) -> ApprovalSettlement:
        """Start the run from the top: it ends by itself this time."""
        self.run = run
        found = stages.await_approval(proposal)
        assert found is not None
        return found


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(approvals, "read_draft", lambda *_: SimpleNamespace(imported=True))
    return Rig(tmp_path, monkeypatch)


def test_a_promotion_that_needs_nobody_is_not_held(rig: Rig) -> None:
    rig.policy = ApprovalPolicy()
    rig.suspendable = False
    assert stages.await_approval(rig.candidate()) is None
    assert approvals.read(rig.store, DRAFTS).requests == []


def test_a_run_waits_once_however_often_it_starts_and_goes_on_when_it_is_approved(rig: Rig) -> None:
    proposal = rig.candidate()
    request = rig.waits(proposal)
    assert rig.waits(proposal) == request
    assert len(approvals.read(rig.store, DRAFTS).requests) == 1
    assert rig.keys[0] == rig.keys[1], "it waits for the same form"
    rig.hand(signed_form("ada", request=request))
    found = rig.again(proposal)
    assert (found.outcome, found.approved_by) == ("approved", ("ada",))
    assert rig.again(proposal) == found, "a run that dies after it goes on all the same"
    assert candidate_on(rig.store, DRAFTS, proposal.branch) == B
    (record,) = [e.record for e in history.events(rig.store.log(DRAFTS, proposal.branch)) if e.record.kind == "verdict"]
    assert (record.facts["approval"], record.facts["approved_by"]) == (found.digest(), "ada")


def test_a_form_that_does_not_count_is_recorded_and_asked_for_again_under_another_key(rig: Rig) -> None:
    proposal = rig.candidate()
    request = rig.waits(proposal)
    for filled in (Form(), form(decision="yes"), signed_form("ada", request=request, verdict="9" * 64)):
        rig.hand(filled)
        rig.waits(proposal)
    answers = ledger.every(rig.store, DRAFTS, approvals.ANSWER, ApprovalAnswer)
    assert [bool(a.problems) for a in answers] == [True] * 3
    assert len(set(rig.keys)) == 4
    rig.hand(signed_form("ada", request=request, decision="refuse"))
    assert rig.again(proposal).cause == "reviewers"


def test_two_of_two_approvers_are_waited_for(rig: Rig) -> None:
    rig.policy = POLICY.model_copy(update={"approvers": 2})
    proposal = rig.candidate()
    request = rig.waits(proposal)
    for name in ("ada", "ada"):
        rig.hand(signed_form(name, request=request))
        rig.waits(proposal)
    rig.hand(signed_form("bob", request=request))
    assert rig.again(proposal).approved_by == ("ada", "bob")


def test_an_unsigned_form_counts_on_loopback_alone(rig: Rig) -> None:
    proposal = rig.candidate()
    rig.loopback = False
    rig.waits(proposal)
    rig.hand(form())
    rig.waits(proposal)
    rig.loopback = True
    rig.hand(form())
    assert rig.again(proposal).reasons == ("approved by ada (unverified): it is plausible",)


def test_a_run_that_cannot_be_suspended_says_how_to_start_one_that_can(rig: Rig) -> None:
    rig.suspendable = False
    with pytest.raises(ConfigError):
        stages.await_approval(rig.candidate())
    assert approvals.read(rig.store, DRAFTS).requests == []


def test_a_first_draft_of_ours_is_a_condition(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.policy = POLICY.model_copy(update={"mode": "conditions"})
    proposal = rig.candidate()
    assert rig.waits(proposal).reasons[0].startswith("first_draft")
    monkeypatch.setattr(approvals, "read_draft", lambda *_: SimpleNamespace(imported=False))
    rig.run = TWO
    assert stages.await_approval(proposal) is None


def test_a_killed_promotion_that_was_merged_is_finished_without_asking_again(rig: Rig) -> None:
    proposal = rig.candidate()
    rig.serve(2, B, proposal.verdict.digest())
    assert stages.find_proposal.fn(proposal.branch) == proposal
    assert stages.await_approval(proposal) is None


# Another run, and the clock


def test_a_newer_promotion_supersedes_what_waits_and_resumes_it_so_that_it_ends(rig: Rig) -> None:
    older, newer = rig.candidate(B), rig.candidate(C)
    rig.waits(older)
    rig.waits(newer, TWO)
    assert rig.resumed == [ONE]
    assert [w.request.run for w in approvals.waiting(rig.store, DRAFTS)] == [TWO]
    found = rig.again(older)
    assert (found.outcome, found.cause) == ("refused", "superseded")
    assert rig.waits(newer, TWO).run == TWO, "which was not disturbed"


def test_a_newer_promotion_that_asks_nobody_supersedes_too(rig: Rig) -> None:
    older, newer = rig.candidate(B), rig.candidate(C)
    rig.waits(older)
    rig.policy, rig.run = ApprovalPolicy(), TWO
    assert stages.await_approval(newer) is None
    assert rig.again(older).cause == "superseded"


def test_a_run_whose_time_is_over_ends_refused_and_no_form_helps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    proposal = rig.candidate()
    request = rig.waits(proposal)
    rig.hand(signed_form("ada", request=request))
    monkeypatch.setattr(time, "time", lambda: request.expires_at)
    assert rig.again(proposal).cause == "timeout"


def test_what_waited_too_long_is_refused_and_its_run_resumed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    request = rig.waits(rig.candidate())
    rig.run = TWO
    assert stages.expire_approvals.fn() == []
    assert rig.resumed == []
    monkeypatch.setattr(time, "time", lambda: request.expires_at)
    (ended,) = stages.expire_approvals.fn()
    assert (ended.run, ended.cause, rig.resumed) == (ONE, "timeout", [ONE])
    stages.expire_approvals.fn()
    assert rig.resumed == [ONE, ONE], "should a killed process not have come to it"


@pytest.mark.parametrize("final", [True, False])
def test_a_request_whose_run_was_cancelled_is_abandoned(rig: Rig, final: bool) -> None:
    rig.waits(rig.candidate())
    rig.states[ONE] = SimpleNamespace(name="Cancelled", is_final=lambda: final)
    rig.run = TWO
    assert [s.cause for s in stages.expire_approvals.fn()] == (["abandoned"] if final else [])


# Which verdict goes on


def test_a_verdict_that_holds_is_found_with_the_generation_it_may_take_over_from(rig: Rig) -> None:
    proposal = rig.candidate()
    assert stages.find_proposal.fn(proposal.branch) == proposal
    rig.serve(2, C)
    assert stages.find_proposal.fn(proposal.branch) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"key": STRANGER},
        {"verdict": {"outcome": "reject"}},
        {"verdict": {"outcome": "reject"}, "forged": True},
        {"verdict": {"policy": "0" * 64}},
    ],
    ids=["stranger", "reject", "forged", "policy"],
)
def test_a_verdict_that_does_not_hold_is_judged_again(rig: Rig, changed: Any) -> None:
    assert stages.find_proposal.fn(rig.candidate(**changed).branch) is None


def test_a_run_that_starts_again_finds_what_it_asked_about_and_a_refused_verdict_is_not_asked_about_again(
    rig: Rig,
) -> None:
    proposal = rig.candidate()
    request = rig.waits(proposal)
    rig.serve(2, C)
    assert stages.find_proposal.fn(proposal.branch) == proposal, "the rollout finds out that it is stale"
    rig.hand(signed_form("ada", request=request, decision="refuse"))
    rig.again(proposal)
    assert stages.find_proposal.fn(proposal.branch) == proposal, "the run itself ends with its refusal"
    rig.serve(3, A)
    rig.run = TWO
    assert stages.find_proposal.fn(proposal.branch) is None


def test_a_candidate_that_was_judged_again_meanwhile_makes_what_was_asked_stale(rig: Rig) -> None:
    proposal = rig.candidate()
    rig.waits(proposal)
    later = proposal.verdict.model_copy(update={"attempt": 2})
    put_verdict(rig.store, DRAFTS, proposal.branch, later)
    assert stages.find_proposal.fn(proposal.branch) is None
    assert [s.cause for s in approvals.read(rig.store, DRAFTS).stale] == ["stale"]
    assert stages.find_proposal.fn(proposal.branch) == Proposal(branch=proposal.branch, verdict=later, generation=1)


def test_after_a_stale_approval_the_new_verdict_needs_one_of_its_own(rig: Rig) -> None:
    proposal = rig.candidate()
    request = rig.waits(proposal)
    rig.hand(signed_form("ada", request=request))
    approved = rig.again(proposal)
    stages.void_approval.fn(approved)
    again = proposal.model_copy(update={"verdict": proposal.verdict.model_copy(update={"attempt": 2})})
    assert rig.waits(again).verdict == again.verdict.digest() != request.verdict
    rig.run = TWO
    assert stages.expire_approvals.fn() == []
    assert rig.resumed == [], "it waits anew, and is not disturbed for what was settled before"


def test_an_approval_written_into_the_ledger_by_hand_lets_nothing_through(rig: Rig) -> None:
    proposal = rig.candidate()
    request = rig.waits(proposal)
    approved = approval_rules.refusal(request, "reviewers", ["trust me"], time.time())
    approvals.settle(rig.store, DRAFTS, request, approved.model_copy(update={"outcome": "approved"}))
    with pytest.raises(SignatureRefused, match="0 of 1"):
        stages.await_approval(proposal)


def test_a_rollout_by_hand_needs_the_same_approval(rig: Rig) -> None:
    proposal = rig.candidate()

    def by_hand(policy: ApprovalPolicy = POLICY) -> None:
        approvals.require(rig.store, DRAFTS, proposal.verdict, policy, loopback=True)

    by_hand(ApprovalPolicy())
    request = rig.waits(proposal)
    with pytest.raises(ApprovalRefused, match="nobody has"):
        by_hand()
    rig.hand(signed_form("ada", request=request))
    rig.again(proposal)
    by_hand()
    with pytest.raises(SignatureRefused):
        by_hand(POLICY.model_copy(update={"reviewers": {}}))


def test_a_promotion_is_started_without_a_parent_and_once_a_verdict(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    numbers = itertools.count()

    def run_deployment(name: str, **options: Any) -> Any:
        asked.update(options, name=name)
        return stages.FlowRun(id=ONE, flow_id=TWO, name=f"run-{next(numbers)}")

    monkeypatch.setattr(stages, "run_deployment", run_deployment)
    proposal = rig.candidate()
    assert stages.start_promotion.fn(proposal, "5" * 64) == ONE
    assert (asked["name"], asked["as_subflow"], asked["timeout"]) == ("promote/promote", False, 0)
    assert asked["idempotency_key"] == Verdict.digest(proposal.verdict)
    assert asked["parameters"] == {"branch": proposal.branch, "states_ref": "5" * 64}
