"""When a person is needed, whether an answer counts, and how a request ends: each threshold from both sides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.approving import KEYS, NOW, POLICY, REQUEST, VERDICT, form, signed_form, unsigned
from tests.support.signed import verdict_on
from tide.approvals import rules as approval_rules
from tide.approvals.answers import Form, examine, is_loopback
from tide.config import ApprovalPolicy
from tide.domain import ApprovalAnswer, ApprovalRequest, Proposal, Serving, ServingDraft
from tide.errors import SignatureRefused

A, B, C = "a" * 64, "b" * 64, "c" * 64


def look(
    filled: Form,
    policy: ApprovalPolicy = POLICY,
    earlier: tuple[ApprovalAnswer, ...] = (),
    *,
    loopback: bool = True,
    now: float = NOW + 5,
) -> ApprovalAnswer:
    return examine(filled, REQUEST, policy, earlier, loopback=loopback, now=now)


def answers(*forms: Form, policy: ApprovalPolicy = POLICY) -> tuple[ApprovalAnswer, ...]:
    found: tuple[ApprovalAnswer, ...] = ()
    for filled in forms:
        found = (*found, look(filled, policy, found))
    return found


def end(
    *forms: Form, policy: ApprovalPolicy = POLICY, others: tuple[ApprovalRequest, ...] = (), now: float = NOW + 9
) -> Any:
    given_answers = answers(*forms, policy=policy)
    return approval_rules.conclude(REQUEST, (REQUEST, *others), given_answers, policy, loopback=True, now=now)


# Whether a person is needed


def needed(first: bool = False, **policy: Any) -> tuple[str, ...]:
    return approval_rules.needed(VERDICT, ApprovalPolicy(**policy), first=first)


def test_by_default_the_verdict_is_enough() -> None:
    assert needed(first=True) == ()


def test_a_manual_policy_always_asks() -> None:
    assert needed(mode="manual") != ()


@pytest.mark.parametrize(
    ("first", "policy", "rule"),
    [
        (True, {}, "first_draft"),
        (True, {"first_draft": False}, None),
        (False, {}, None),
        (False, {"gain_above": 0.33}, "gain_above"),
        (False, {"gain_above": 0.34}, None),
        (False, {"gain_below": 0.35}, "gain_below"),
        (False, {"gain_below": 0.34}, None),
    ],
)
def test_each_condition_asks_on_its_own_side_of_its_threshold(first: bool, policy: Any, rule: str | None) -> None:
    """The verdict's gain is estimated at +.34."""
    found = needed(first, mode="conditions", **policy)
    assert [reason.partition(":")[0] for reason in found] == ([rule] if rule else [])


def test_a_policy_by_which_nobody_could_approve_is_refused() -> None:
    with pytest.raises(ValidationError, match="nobody could"):
        ApprovalPolicy(mode="manual", unverified="never")
    ApprovalPolicy(mode="manual", unverified="never", reviewers={"ada": A})
    with pytest.raises(ValidationError, match="one person"):
        ApprovalPolicy(reviewers={"ada": A, "bob": A})


# Whether an answer counts


def test_a_signed_approval_counts() -> None:
    found = look(signed_form("ada"), loopback=False)
    assert (found.problems, found.decision, found.reviewer) == ((), "approve", "ada")


@pytest.mark.parametrize("missing", ["decision", "reviewer", "reason"])
def test_a_form_with_a_missing_field_does_not_count_and_says_which(missing: str) -> None:
    found = look(form(**{missing: "  "}))
    assert [problem.partition(":")[0] for problem in found.problems] == [missing]


@pytest.mark.parametrize(
    ("unverified", "loopback", "counts"),
    [("loopback", True, True), ("loopback", False, False), ("never", True, False), ("always", False, True)],
)
def test_a_form_without_a_signature_counts_where_policy_allows_it(
    unverified: Any, loopback: bool, counts: bool
) -> None:
    policy = POLICY.model_copy(update={"unverified": unverified})
    assert (look(unsigned("ada"), policy, loopback=loopback).problems == ()) is counts


def test_a_signature_of_another_key_or_of_nobody_policy_knows_does_not_count() -> None:
    assert "not by the key" in look(signed_form("ada", key=KEYS["bob"])).problems[0]
    assert "no key of 'eve'" in look(signed_form("eve", key=KEYS["bob"])).problems[0]


@pytest.mark.parametrize("about", ["run", "verdict", "candidate", "incumbent"])
def test_an_approval_of_something_else_does_not_count_here(about: str) -> None:
    found = look(signed_form("ada", **{about: "9" * 64}))
    assert found.problems == (f"signed: it is about another {about}",)


def test_what_is_signed_is_what_counts_whatever_stands_beside_it() -> None:
    refusal = signed_form("ada", decision="refuse")
    found = look(Form("approve", "bob", "changed on the way", refusal.signed))
    assert (found.decision, found.reviewer, found.problems) == ("refuse", "ada", ())


@pytest.mark.parametrize("text", ["x", "{}", '{"kind": "approval"}'])
def test_a_signature_that_is_none_does_not_count_as_an_unsigned_form(text: str) -> None:
    assert look(form(signed=text)).problems[0].startswith("signed: ")


def test_an_answer_at_its_last_moment_counts_and_one_after_it_does_not() -> None:
    assert look(signed_form("ada"), now=REQUEST.expires_at - 0.001).problems == ()
    assert look(signed_form("ada"), now=REQUEST.expires_at).problems[0].startswith("timeout")


@given(st.text(), st.text(), st.text(), st.text())
def test_no_form_raises(decision: str, reviewer: str, reason: str, signed: str) -> None:
    found = look(Form(decision, reviewer, reason, signed))
    assert ApprovalAnswer.model_validate_json(found.to_json()) == found


# What answers amount to


def test_one_approval_of_one_ends_it() -> None:
    found = end(signed_form("ada"))
    assert (found.outcome, found.cause, found.approved_by) == ("approved", "reviewers", ("ada",))


def test_the_same_person_counts_once() -> None:
    policy = POLICY.model_copy(update={"approvers": 2})
    assert end(signed_form("ada"), signed_form("ada"), unsigned("ada"), policy=policy) is None
    assert "counts once" in answers(signed_form("ada"), signed_form("ada"), policy=policy)[1].problems[0]
    assert end(signed_form("ada"), signed_form("bob"), policy=policy).approved_by == ("ada", "bob")


def test_one_who_refuses_is_enough_even_one_who_approved_before() -> None:
    policy = POLICY.model_copy(update={"approvers": 2})
    for name in ("ada", "bob"):
        found = end(signed_form("ada"), signed_form(name, decision="refuse"), policy=policy)
        assert (found.outcome, found.cause) == ("refused", "reviewers")


def test_a_policy_that_wants_more_approvers_by_now_is_heard_and_one_that_wants_fewer_is_not() -> None:
    assert end(signed_form("ada"), policy=POLICY.model_copy(update={"approvers": 2})) is None
    two = REQUEST.model_copy(update={"approvers": 2})
    only = look(signed_form("ada")).model_copy(update={"request": two.digest()})
    assert approval_rules.weigh(two, (only,), POLICY, loopback=True).state == "wait"


def test_nothing_ends_until_its_time_and_then_it_is_refused() -> None:
    assert end(form(reason=""), now=REQUEST.expires_at - 0.001) is None
    found = end(form(reason=""), now=REQUEST.expires_at)
    assert (found.outcome, found.cause) == ("refused", "timeout")
    assert end(signed_form("ada"), now=REQUEST.expires_at).outcome == "approved", "it was given in time"


def test_a_newer_request_of_another_run_takes_over_and_an_older_one_does_not() -> None:
    newer, older = (REQUEST.model_copy(update={"run": "other", "asked_at": NOW + by}) for by in (0.001, -0.001))
    found = end(signed_form("ada"), others=(newer,))
    assert (found.outcome, found.cause) == ("refused", "superseded")
    assert end(signed_form("ada"), others=(older,)).outcome == "approved"
    again = REQUEST.model_copy(update={"asked_at": NOW + 1})
    assert end(signed_form("ada"), others=(again,)).outcome == "approved", "of the same run: judged again"


def test_an_approval_in_the_ledger_without_its_signatures_is_no_approval() -> None:
    forged = look(signed_form("ada", key=KEYS["bob"])).model_copy(update={"problems": ()})
    with pytest.raises(SignatureRefused, match="0 of 1 approvals"):
        approval_rules.require_approved(REQUEST, (forged,), POLICY, loopback=True)
    approval_rules.require_approved(REQUEST, answers(signed_form("ada")), POLICY, loopback=True)


# Which verdict holds


def holds(serving: Serving, policy: str = "f" * 64, spent: tuple[str, ...] = ()) -> int | None:
    return approval_rules.generation_for(verdict_on(B, A), serving, policy, spent)


def serving(generation: int, draft: str, verdict: str | None = None) -> Serving:
    return Serving(generation=generation, stable=ServingDraft(digest=draft, verdict=verdict))


def test_a_verdict_holds_against_the_incumbent_and_policy_it_was_made_with() -> None:
    assert holds(serving(4, A)) == 4
    assert holds(serving(4, C)) is None
    assert holds(Serving()) is None
    assert holds(serving(4, A), policy="0" * 64) is None
    assert holds(serving(4, A), spent=(verdict_on(B, A).digest(),)) is None
    assert approval_rules.generation_for(verdict_on(B), Serving(), "f" * 64, ()) == 0


def test_a_verdict_whose_killed_promotion_was_merged_is_finished_and_not_judged_again() -> None:
    assert holds(serving(5, B, verdict_on(B, A).digest())) == 4
    assert holds(serving(5, B)) is None


def test_a_request_says_what_it_binds_to() -> None:
    found = approval_rules.request_for(Proposal(branch="c", verdict=VERDICT, generation=3), "run", ["why"], POLICY, 5.0)
    assert (found.verdict, found.candidate, found.incumbent) == (VERDICT.digest(), B, A)
    assert (found.generation, found.asked_at, found.expires_at - found.asked_at) == (3, 5.0, POLICY.timeout_s)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("http://[::1]:4200/api", True),
        ("http://localhost:4200/api", True),
        ("http://127.0.0.1.example.com/api", False),
        ("http://10.0.0.7:4200/api", False),
        ("http://0.0.0.0:4200/api", False),
        ("", False),
    ],
)
def test_an_address_is_of_this_machine_alone_or_not(url: str, local: bool) -> None:
    assert is_loopback(url) is local
