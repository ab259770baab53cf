"""The promote flow: the order of its stages, who is asked, and what it does when another promotion is faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows import judging
from flows import promote as module
from tests.support.approving import NOW, REQUEST
from tests.support.signed import verdict_on
from tide.approvals import rules as approval_rules
from tide.domain import (
    ApprovalSettlement,
    CanaryLease,
    CanaryRefusal,
    CanaryReport,
    Promotion,
    Proposal,
    Serving,
    ServingDraft,
)
from tide.errors import Conflict

A, B, C = "a" * 64, "b" * 64, "c" * 64
TAKEN_BACK = CanaryRefusal(
    generation=2,
    previous=A,
    lease=CanaryLease(draft=B, verdict="f" * 64, replicas=("r0",), run="host/1/1", lease_until=2.0),
    report=CanaryReport(outcome="regression", reasons=("worse",)),
    replicas=(),
    at=1.0,
)
PROMOTED = Promotion(kind="promotion", generation=3, draft=B, previous=C, verdict=None, replicas=(), at=1.0)
REFUSED = approval_rules.refusal(REQUEST, "reviewers", ["refused by ada: no"], NOW)
APPROVED = REFUSED.model_copy(update={"outcome": "approved", "reasons": ("approved by ada: yes",)})


class Stages:
    """Stand-ins for the stages: what serves by turn, what the rollout and people answer by turn, what was judged."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, serving: list[Serving], answers: list[Promotion | CanaryRefusal | None]
    ) -> None:
        self.serving, self.answers = serving, answers
        self.judged: list[str] = []
        self.walked: list[str] = []
        self.rolled_out: list[int] = []
        self.voided: list[ApprovalSettlement] = []
        self.found: list[Proposal | None] = []
        self.people: list[ApprovalSettlement | None] = []
        judged: dict[str, Any] = {
            "pin_snapshot": lambda _ref: SimpleNamespace(commit="5" * 64),
            "fetch_candidate": lambda _branch: SimpleNamespace(digest=B),
            "fetch_gate": lambda *_: (None, ()),
            "fetch_incumbent": lambda: self.serving.pop(0),
            "walk_draft": self.walk,
            "decide_promotion": self.decide,
        }
        stages: dict[str, Any] = {
            "expire_approvals": lambda: [],
            "find_proposal": lambda _branch: self.found.pop(0) if self.found else None,
            "await_approval": lambda _proposal: self.people.pop(0) if self.people else None,
            "void_approval": self.voided.append,
            "roll_out": self.roll_out,
        }
        for name, stage in judged.items():
            monkeypatch.setattr(judging, name, stage)
        for name, stage in stages.items():
            monkeypatch.setattr(module, name, stage)

    def walk(self, digest: str, *_: object) -> str:
        self.walked.append(digest)
        return digest

    def decide(self, _branch: str, ours: str, theirs: str | None, _snapshot: object, _gate: object) -> object:
        self.judged.append(theirs or "none")
        return verdict_on(ours, theirs or "none", self.outcome)

    outcome: Any = "promote"

    def roll_out(self, _branch: str, _digest: str, generation: int) -> Promotion | CanaryRefusal | None:
        self.rolled_out.append(generation)
        return self.answers.pop(0)


def at(generation: int, digest: str) -> Serving:
    return Serving(generation=generation, stable=ServingDraft(digest=digest))


def test_a_candidate_is_judged_over_the_same_requests_as_the_incumbent_and_promoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [PROMOTED])
    result = module.promote.fn("candidate-b")
    assert (stages.walked, stages.judged, stages.rolled_out) == ([B, A], [A], [1])
    assert (result.promotion, result.approval) == (PROMOTED, None)


def test_a_verdict_that_holds_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [], [PROMOTED])
    stages.found = [Proposal(branch="candidate-b", verdict=verdict_on(B, A), generation=7)]
    result = module.promote.fn("candidate-b")
    assert (stages.judged, stages.rolled_out, result.promotion) == ([], [7], PROMOTED)


def test_a_refusal_by_people_ends_the_flow_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [])
    stages.people = [REFUSED]
    result = module.promote.fn("candidate-b")
    assert (stages.rolled_out, result.approval, result.promotion) == ([], REFUSED, None)


def test_an_approval_is_in_the_result_of_the_promotion_it_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [PROMOTED])
    stages.people = [APPROVED]
    assert module.promote.fn("candidate-b").approval == APPROVED
    assert stages.voided == []


def test_an_approval_of_a_stale_verdict_is_void_and_people_are_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A), at(2, C)], [None])
    stages.people = [APPROVED, REFUSED]
    result = module.promote.fn("candidate-b")
    assert (stages.judged, stages.voided, stages.rolled_out) == ([A, C], [APPROVED], [1])
    assert (result.verdict.incumbent, result.approval, result.promotion) == (C, REFUSED, None)


def test_a_lost_race_is_judged_again_against_the_draft_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A), at(2, C)], [None, PROMOTED])
    result = module.promote.fn("candidate-b")
    assert stages.judged == [A, C]
    assert stages.rolled_out == [1, 2]
    assert (result.verdict.incumbent, result.promotion) == (C, PROMOTED)


def test_a_candidate_that_the_canary_refuses_ends_the_flow_well_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [TAKEN_BACK])
    result = module.promote.fn("candidate-b")
    assert (result.verdict.outcome, result.promotion, result.refusal) == ("promote", None, TAKEN_BACK)
    assert stages.rolled_out == [1]


def test_a_race_lost_again_and_again_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(n, A) for n in range(9)], [None] * 9)
    with pytest.raises(Conflict, match="faster 3 times"):
        module.promote.fn("candidate-b")
    assert len(stages.rolled_out) == 3


@pytest.mark.parametrize("outcome", ["reject", "inconclusive"])
def test_a_verdict_that_is_no_promote_ends_the_flow_well(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [])
    stages.outcome = outcome
    result = module.promote.fn("candidate-b")
    assert (result.verdict.outcome, result.promotion, stages.rolled_out) == (outcome, None, [])


def test_a_dry_run_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [])
    result = module.promote.fn("candidate-b", dry_run=True)
    assert (result.verdict.outcome, result.promotion, stages.rolled_out) == ("promote", None, [])


def test_a_first_draft_is_judged_against_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [Serving()], [PROMOTED])
    module.promote.fn("candidate-b")
    assert (stages.walked, stages.judged, stages.rolled_out) == ([B], ["none"], [0])
