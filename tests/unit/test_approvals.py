"""Approvals in the ledger: what waits, what ended, and that it ends once whoever comes first."""

from __future__ import annotations

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.support.approving import NOW, POLICY, REQUEST, form, signed_form
from tide import repositories
from tide.approvals import rules as approval_rules
from tide.approvals import steps as approvals
from tide.approvals import text as approval_text
from tide.approvals.answers import Form, examine
from tide.domain import ApprovalRequest, ApprovalSettlement
from tide.errors import AlreadyExists
from tide.lineage import ledger

DRAFTS = "svc-drafts"
LATER = REQUEST.model_copy(update={"run": "other", "asked_at": NOW + 100, "expires_at": NOW + 700})


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    repositories.ensure_drafts(store, DRAFTS)
    approvals.ask(store, DRAFTS, REQUEST)
    return store


def give(store: MemoryStore, *forms: Form, request: ApprovalRequest = REQUEST) -> None:
    for filled in forms:
        earlier = approvals.read(store, DRAFTS).answers_to(request)
        found = examine(filled, request, POLICY, earlier, loopback=True, now=NOW + 1 + len(earlier))
        approvals.answer(store, DRAFTS, found)


def expire(store: MemoryStore, now: float) -> list[ApprovalSettlement]:
    return approvals.expire(store, DRAFTS, POLICY, loopback=True, now=now)


def test_what_was_asked_waits_with_its_answers_until_it_is_settled(store: MemoryStore) -> None:
    give(store, form(reason=""), signed_form("ada"))
    (found,) = approvals.waiting(store, DRAFTS)
    assert (found.request, len(found.answers), found.approved_by, found.last_problems) == (REQUEST, 2, ("ada",), ())
    approvals.settle(store, DRAFTS, REQUEST, approval_rules.refusal(REQUEST, "timeout", ["late"], NOW + 9))
    assert approvals.waiting(store, DRAFTS) == []


def test_without_a_ledger_nothing_waits() -> None:
    store = MemoryStore()
    assert approvals.waiting(store, DRAFTS) == []
    assert approvals.read(store, DRAFTS).of_run("any") is None


def test_of_two_that_settle_a_request_the_first_is_right(store: MemoryStore) -> None:
    timeout, people = (approval_rules.refusal(REQUEST, cause, [cause], NOW + 9) for cause in ("timeout", "reviewers"))
    assert approvals.settle(store, DRAFTS, REQUEST, people) == people
    assert approvals.settle(store, DRAFTS, REQUEST, timeout) == people
    assert ledger.every(store, DRAFTS, approvals.SETTLED, ApprovalSettlement) == [people]


def test_a_record_made_once_is_not_made_again_and_nothing_is_left_uncommitted(store: MemoryStore) -> None:
    ledger.append(store, DRAFTS, "x", REQUEST, at=1.5, once="0" * 8)
    with pytest.raises(AlreadyExists):
        ledger.append(store, DRAFTS, "x", LATER, at=1.5, once="0" * 8)
    assert ledger.every(store, DRAFTS, "x", ApprovalRequest) == [REQUEST]
    assert list(store.uncommitted(DRAFTS, ledger.BRANCH)) == []


def test_a_request_that_nobody_answered_in_time_is_refused_once_and_not_before(store: MemoryStore) -> None:
    assert expire(store, REQUEST.expires_at - 0.001) == []
    (ended,) = expire(store, REQUEST.expires_at)
    assert (ended.outcome, ended.cause, ended.request) == ("refused", "timeout", REQUEST.digest())
    assert expire(store, REQUEST.expires_at + 1) == []


def test_of_two_that_wait_the_older_one_is_superseded(store: MemoryStore) -> None:
    approvals.ask(store, DRAFTS, LATER)
    (ended,) = expire(store, NOW + 101)
    assert (ended.run, ended.cause) == (REQUEST.run, "superseded")
    assert [w.request for w in approvals.waiting(store, DRAFTS)] == [LATER]


def test_an_approval_that_came_to_nothing_is_stale_and_its_verdict_spent(store: MemoryStore) -> None:
    give(store, signed_form("ada"))
    (approved,) = expire(store, NOW + 5)
    book = approvals.read(store, DRAFTS)
    assert (approved.outcome, book.spent(), book.of_run(REQUEST.run)) == ("approved", set(), REQUEST)
    for _ in range(2):
        approvals.void(store, DRAFTS, REQUEST, "the incumbent changed", NOW + 6)
    book = approvals.read(store, DRAFTS)
    assert [s.cause for s in book.stale] == ["stale"]
    assert (book.spent(), book.of_run(REQUEST.run)) == ({REQUEST.verdict}, None)
    ended = book.end_of(REQUEST)
    assert ended is not None
    assert ended.cause == "stale"


def test_an_answer_that_a_killed_run_wrote_twice_counts_once(store: MemoryStore) -> None:
    found = examine(signed_form("ada"), REQUEST, POLICY, (), loopback=True, now=NOW + 1)
    for at in (NOW + 1, NOW + 2):
        approvals.answer(store, DRAFTS, found.model_copy(update={"at": at}))
    give(store, signed_form("bob"))
    assert [(a.round, a.reviewer) for a in approvals.read(store, DRAFTS).answers_to(REQUEST)] == [
        (0, "ada"),
        (1, "bob"),
    ]


def test_what_waits_is_told_with_gain_times_and_who_agreed(store: MemoryStore) -> None:
    give(store, signed_form("ada"), form(decision="yes"))
    text = approval_text.table(approvals.waiting(store, DRAFTS), NOW)
    for part in (REQUEST.run, "bbbbbbbbbbbb", "aaaaaaaaaaaa", "+0.340 [+0.210, +0.470]", "1 of 1: ada", "decision: "):
        assert part in text
    assert "(over" not in text
    assert "(over" in approval_text.table(approvals.waiting(store, DRAFTS), REQUEST.expires_at)
    assert approval_text.table([], NOW) == "nothing waits for approval"
