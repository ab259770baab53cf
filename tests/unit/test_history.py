"""History and lineage: read from what the rollout, the harvest and the candidates wrote, not from made-up logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.signed import AUTHORITY, judge_and_promote, put_verdict, verdict_on
from tide.approvals import rules as approval_rules
from tide.approvals import steps as approvals
from tide.config import ApprovalPolicy
from tide.domain import LineageRecord, Proposal
from tide.errors import ConfigError, NotFound
from tide.lineage import history, history_text, provenance
from tide.lineage.history import serving_at
from tide.serving import rollout
from tide.serving.rollout import Site, draft_prefix
from tide.store.base import Commit

STATES, DRAFTS = "svc-states", "svc-drafts"
A, B, C, D = "a1" * 32, "a2" * 32, "c" * 64, "d" * 64


def harvest(store: MemoryStore, window: str) -> str:
    """One window, as the harvest writes it: a branch of its own, merged with the same record."""
    record = LineageRecord(kind="states", subject=f"{window}/r0").to_metadata()
    store.create_branch(STATES, f"harvest-{window}-r0", "main")
    store.put(STATES, f"harvest-{window}-r0", f"windows/{window}/r0/manifest.json", b"{}")
    store.commit(STATES, f"harvest-{window}-r0", "harvest", record)
    return store.merge(STATES, f"harvest-{window}-r0", "main", "harvest", record).id


def candidate(store: MemoryStore, digest: str, states: str, parent: str | None) -> None:
    parents = {"states": f"{STATES}@{states}"} | ({"draft": parent} if parent else {})
    facts = {"steps": "220", "trained_tokens": "9000", "seed": "0", "policy": "f" * 64, "cause": "drift"}
    made = LineageRecord(kind="candidate", subject=digest, parents=parents, facts=facts)
    branch = f"candidate-{digest[:6]}"
    store.create_branch(DRAFTS, branch, "main")
    for name in rollout.DRAFT_FILES:
        store.put(DRAFTS, branch, draft_prefix(digest) + name, name.encode())
    store.commit(DRAFTS, branch, "candidate", made.to_metadata())


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """Three windows; A from the first, B from two with A as parent and promoted, C from three and never promoted."""
    store = MemoryStore()
    where = Site(store, DRAFTS, [FakeEngine("r0")], tmp_path)
    store.create_repository(STATES)
    store.create_repository(DRAFTS)
    first = harvest(store, "20261130T0900Z")
    candidate(store, A, first, None)
    second = harvest(store, "20261130T0905Z")
    for generation, (digest, states, parent) in enumerate([(A, first, None), (B, second, A)], start=1):
        if digest != A:
            candidate(store, digest, states, parent)
        branch = f"candidate-{digest[:6]}"
        assert judge_and_promote(store, DRAFTS, where, branch, digest).generation == generation
    candidate(store, C, harvest(store, "20261130T0910Z"), B)
    rollout.rollback(where, AUTHORITY)
    return store


def test_history_has_every_generation_once_with_what_the_gate_found(store: MemoryStore) -> None:
    changes = provenance.changes(store, DRAFTS)
    assert [(c.generation, c.kind, c.draft, c.previous) for c in changes] == [
        (1, "promotion", A, None),
        (2, "promotion", B, A),
        (3, "rollback", A, B),
    ]
    assert changes[1].verdict_facts["difference"] == "0.3400"
    assert changes[1].replicas == ("r0",)
    assert "promote: 0.3400 (at least 0.2100) on 30 requests" in history_text.table(changes)


def test_history_says_who_approved_a_promotion(store: MemoryStore, tmp_path: Path) -> None:
    candidate(store, D, "f" * 64, A)
    branch, verdict = f"candidate-{D[:6]}", verdict_on(D, A)
    put_verdict(store, DRAFTS, branch, verdict)
    request = approval_rules.request_for(
        Proposal(branch=branch, verdict=verdict, generation=3), "run", ["manual"], ApprovalPolicy(approvers=2), 1.0
    )
    approval = approval_rules.refusal(request, "reviewers", ["yes"], 2.0).model_copy(
        update={"outcome": "approved", "approved_by": ("ada", "bob")}
    )
    for _ in range(2):
        approvals.attach(store, DRAFTS, verdict, approval)
    where = Site(store, DRAFTS, [FakeEngine("r0", draft=A)], tmp_path)
    rollout.promote(where, AUTHORITY, candidate_ref=branch, digest=D, expected_generation=3)
    changes = provenance.changes(store, DRAFTS)
    assert changes[-1].verdict_facts["approval"] == approval.digest()
    assert history_text.table(changes).endswith("on 30 requests, approved by ada, bob")
    assert store.read(DRAFTS, "main", draft_prefix(D) + approvals.APPROVAL_FILE) == approval.to_json().encode()


def test_history_at_a_time_is_the_generation_that_served_then(store: MemoryStore) -> None:
    changes = provenance.changes(store, DRAFTS)
    assert serving_at(changes, changes[1].at).generation == 2
    assert serving_at(changes, changes[1].at - 0.5).generation == 1
    assert serving_at(changes, changes[2].at + 1e6).generation == 3
    with pytest.raises(NotFound, match="tide history"):
        serving_at(changes, changes[0].at - 1)


def test_history_of_a_service_that_promoted_nothing_is_empty() -> None:
    assert provenance.changes(MemoryStore(), DRAFTS) == []
    assert history_text.table([]) == "nothing was promoted yet"


def test_lineage_goes_back_through_parents_to_the_windows_each_was_trained_on(store: MemoryStore) -> None:
    origin = provenance.trace(store, DRAFTS, "gen-2")
    assert (origin.draft, origin.generations) == (B, (2,))
    assert origin.windows == ("20261130T0900Z/r0", "20261130T0905Z/r0")
    assert origin.parent is not None
    assert (origin.parent.draft, origin.parent.generations, origin.parent.parent) == (A, (1, 3), None)
    assert origin.parent.windows == ("20261130T0900Z/r0",)
    shown = history_text.tree(origin)
    assert "2 windows, 20261130T0900Z/r0 to 20261130T0905Z/r0" in shown
    assert shown.index(B[:12]) < shown.index(A[:12])
    diagram = history_text.mermaid(origin)
    assert f"d{A[:12]} -->|warm start| d{B[:12]}" in diagram


@pytest.mark.parametrize(("name", "draft"), [("serving", A), (A, A), (C[:8], C), ("a2", B), ("gen-1", A)])
def test_a_draft_is_found_by_what_people_call_it_promoted_or_not(store: MemoryStore, name: str, draft: str) -> None:
    assert provenance.trace(store, DRAFTS, name).draft == draft


@pytest.mark.parametrize(("name", "complaint"), [("a", "2 drafts"), ("ff", "no draft named 'ff'"), ("gen-9", "gen-N")])
def test_a_name_that_means_none_or_several_lists_what_there_is(store: MemoryStore, name: str, complaint: str) -> None:
    with pytest.raises(NotFound, match=complaint):
        provenance.trace(store, DRAFTS, name)


def test_a_parent_without_a_record_ends_the_tree_as_imported(store: MemoryStore) -> None:
    candidate(store, "e" * 64, "f" * 64, "9" * 64)
    origin = provenance.trace(store, DRAFTS, "eee")
    assert origin.windows == ()
    assert origin.parent is not None
    assert origin.parent.at is None
    assert "imported" in history_text.tree(origin)


def test_a_record_that_names_itself_as_parent_does_not_loop() -> None:
    record = LineageRecord(kind="candidate", subject=A, parents={"draft": A})
    event = history.Event(commit="c", at=1.0, record=record)
    assert history.origin(A, [event], {}).parent is None


@pytest.mark.parametrize("text", ["2026-11-30T09:00", "2026-11-30T10:00+01:00"])
def test_a_time_without_a_zone_is_utc(text: str) -> None:
    assert history_text.moment(history_text.parse_moment(text)) == "2026-11-30 09:00:00 UTC"


def test_what_is_no_time_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match="write 2026-11-30T09:00"):
        history_text.parse_moment("yesterday")


class CountingStore(MemoryStore):
    """Counts what a view asks of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def log(self, repository: str, ref: str) -> Iterator[Commit]:
        self.asked.append(f"log {repository}@{ref}")
        return super().log(repository, ref)

    def read(self, repository: str, ref: str, path: str) -> bytes:
        self.asked.append(f"read {path}")
        return super().read(repository, ref, path)


def test_a_long_lineage_is_read_from_one_log_a_repository(tmp_path: Path) -> None:
    store = CountingStore()
    store.create_repository(STATES)
    store.create_repository(DRAFTS)
    drafts = [f"{i:064x}" for i in range(1, 13)]
    for i, digest in enumerate(drafts):
        candidate(store, digest, harvest(store, f"{i:08d}"), drafts[i - 1] if i else None)
        store.merge(DRAFTS, f"candidate-{digest[:6]}", "main", "promoted", {})
    store.asked.clear()
    origin = provenance.trace(store, DRAFTS, drafts[-1])
    assert len(origin.windows) == 12
    assert store.asked == [f"log {DRAFTS}@main", f"log {STATES}@main"]
