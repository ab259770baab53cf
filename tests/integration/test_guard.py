"""The drafts repository's main on a real lakeFS: what its hook lets in, what it refuses, and what a lost race does."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from infra.lakefs.server import LakefsServer
from tests.fakes.fake_engine import FakeEngine
from tests.support.signed import AUTHORITY, judge_and_promote, put_verdict, verdict_on
from tide import repositories
from tide.canary import lease as canary_lease
from tide.domain import (
    Attestation,
    CanaryLease,
    CanaryRefusal,
    CanaryReport,
    LineageRecord,
    PoolChoice,
    Serving,
    ServingDraft,
)
from tide.errors import Conflict, HookRefused, ProtectedBranch, SignatureRefused
from tide.models import candidates
from tide.serving import rollout
from tide.serving.replicas import DRAFT_FILES
from tide.serving.rollout import Site, read_serving
from tide.serving.serving_file import attestation_path, candidate_on, draft_prefix, read_attestation, read_promotions
from tide.store.lakefs import LakefsStore

A, B, C, D = "a" * 64, "b" * 64, "c" * 64, "d" * 64
_NUMBER = itertools.count()


@pytest.fixture
def site(lakefs_server: LakefsServer, tmp_path: Path) -> Site:
    keys = lakefs_server.credentials
    store = LakefsStore(lakefs_server.endpoint, keys.access_key, keys.secret_key)
    return Site(store, f"guard-{next(_NUMBER)}-drafts", [FakeEngine("r0")], tmp_path)


def candidate(site: Site, digest: str) -> str:
    branch = f"{repositories.CANDIDATE}{digest[:6]}"
    repositories.ensure_drafts(site.store, site.repository)
    site.store.create_branch(site.repository, branch, "main")
    for name in DRAFT_FILES:
        site.store.put(site.repository, branch, draft_prefix(digest) + name, name.encode())
    record = LineageRecord(kind="candidate", subject=digest).to_metadata()
    site.store.commit(site.repository, branch, "candidate", record)
    return branch


def promote(site: Site, digest: str) -> None:
    judge_and_promote(site.store, site.repository, site, candidate(site, digest), digest)


def metadata(kind: str, draft: str, generation: int) -> dict[str, str]:
    return {"tide.kind": kind, "tide.subject": draft, "tide.generation": str(generation)}


def by_hand(site: Site, *, serving: Serving, statement: Attestation | None, record: dict[str, str]) -> None:
    """What somebody with lakeFS's keys, and no signing key of ours, may try: a branch of their own, merged."""
    branch = f"by-hand-{next(_NUMBER)}"
    site.store.create_branch(site.repository, branch, "main")
    site.store.put(site.repository, branch, "serving.json", serving.to_json().encode())
    if statement is not None:
        signed = AUTHORITY.key.sign("attestation", statement)
        path = attestation_path(serving.generation)
        if statement.kind == "canary":
            path = canary_lease.attestation_path(statement.generation)
        site.store.put(site.repository, branch, path, signed.to_json().encode())
    site.store.commit(site.repository, branch, "by hand", record)
    site.store.merge(site.repository, branch, "main", "by hand", record)


def test_promotions_and_a_rollback_pass_the_guard_by_their_own_records(site: Site) -> None:
    promote(site, A)
    promote(site, B)
    rollout.rollback(site, AUTHORITY)
    serving = read_serving(site.store, site.repository)
    assert (serving.generation, serving.stable and serving.stable.digest) == (3, A)
    assert rollout.reconcile(site, AUTHORITY.trusted) == []


def test_a_draft_that_served_before_is_promoted_again_from_the_pool_by_a_new_verdict_alone(site: Site) -> None:
    promote(site, A)
    promote(site, B)
    branch = f"{repositories.CANDIDATE}pool-{A[:6]}"
    choice = PoolChoice(
        chosen=A,
        reason="it fits",
        incumbent=B,
        incumbent_length=1.4,
        lengths={A: 1.9},
        requests=30,
        states_commit="5" * 64,
    )
    candidates.propose_again(site.store, site.repository, branch, choice)
    assert candidate_on(site.store, site.repository, branch) == A
    with pytest.raises(SignatureRefused, match="no signed verdict"):
        rollout.resume(site, AUTHORITY, branch)
    promotion = judge_and_promote(site.store, site.repository, site, branch, A)
    serving = read_serving(site.store, site.repository)
    assert (promotion.kind, serving.generation, serving.stable and serving.stable.digest) == ("promotion", 3, A)
    assert read_attestation(site.store, site.repository, AUTHORITY.trusted)[1].verdict is not None
    assert [p.draft for p in read_promotions(site.store, site.repository)] == [A, B, A]
    assert site.store.read(site.repository, "main", draft_prefix(A) + candidates.POOL_FILE)
    assert rollout.reconcile(site, AUTHORITY.trusted) == []


WANTED = Serving(generation=2, stable=ServingDraft(digest=B), previous=ServingDraft(digest=A))
STATEMENT = Attestation(kind="rollback", generation=2, draft=B, previous=A, verdict=None, at=1.0)


@pytest.mark.parametrize(
    ("serving", "statement", "record", "why"),
    [
        (WANTED, STATEMENT, {}, "no record of a known kind"),
        (WANTED, STATEMENT, metadata("quick-fix", B, 2), "no record of a known kind"),
        (WANTED, None, metadata("rollback", B, 2), r"no attestations/000002\.json"),
        (WANTED, STATEMENT, metadata("promotion", B, 2), "is a rollback, the merge a promotion"),
        (WANTED, STATEMENT, metadata("rollback", C, 2), "is for draft bbb"),
        (WANTED, STATEMENT.model_copy(update={"draft": C}), metadata("rollback", B, 2), "is for draft ccc"),
        (WANTED, STATEMENT.model_copy(update={"generation": 7}), metadata("rollback", B, 2), "is for generation 7"),
        (WANTED, STATEMENT, {"tide.kind": "rollback", "tide.subject": B}, "no generation"),
        (
            WANTED.model_copy(update={"stable": ServingDraft(digest=C)}),
            STATEMENT,
            metadata("rollback", B, 2),
            r"serving\.json names draft ccc",
        ),
        (WANTED, STATEMENT, metadata("guard", B, 2), "may not change"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_guard_refuses_a_merge_whose_record_is_missing_or_does_not_match(
    site: Site, serving: Serving, statement: Attestation | None, record: dict[str, str], why: str
) -> None:
    promote(site, A)
    with pytest.raises(HookRefused, match=why):
        by_hand(site, serving=serving, statement=statement, record=record)
    assert read_serving(site.store, site.repository).generation == 1


def test_main_takes_no_direct_write(site: Site) -> None:
    promote(site, A)
    with pytest.raises(ProtectedBranch):
        site.store.put(site.repository, "main", "serving.json", b"{}")


def test_a_missing_or_older_guard_is_replaced_and_then_guards(site: Site) -> None:
    site.store.create_repository(site.repository)
    assert not repositories.guarded(site.store, site.repository)
    repositories.mend_drafts(site.store, site.repository)
    assert repositories.guarded(site.store, site.repository)
    repositories.mend_drafts(site.store, site.repository)
    promote(site, A)
    with pytest.raises(HookRefused, match="no record of a known kind"):
        by_hand(site, serving=WANTED, statement=STATEMENT, record={})


def test_of_two_changes_at_once_one_serves_and_the_loser_is_told_to_judge_again(site: Site) -> None:
    promote(site, A)
    promote(site, C)
    branch = candidate(site, B)
    put_verdict(site.store, site.repository, branch, verdict_on(B, incumbent=C))
    engine = site.replicas[0]
    assert isinstance(engine, FakeEngine)

    def someone_is_faster(_: str) -> None:
        engine.before_swap = None
        other = Site(site.store, site.repository, [FakeEngine("r0")], site.draft_dir / "other")
        with pytest.raises(Conflict, match="is on trial on r0"):
            promote(other, D)
        rollout.rollback(other, AUTHORITY)

    engine.before_swap = someone_is_faster
    with pytest.raises(Conflict, match="evaluate"):
        rollout.promote(site, AUTHORITY, candidate_ref=branch, digest=B, expected_generation=2)
    serving = read_serving(site.store, site.repository)
    assert (serving.generation, serving.stable and serving.stable.digest, engine.active_draft()) == (3, A, A)


# The canary's lease


def test_a_canary_that_refuses_and_one_that_passes_both_pass_the_guard(site: Site) -> None:
    promote(site, A)
    bad = CanaryReport(outcome="regression", reasons=("worse",))
    watched = dataclasses.replace(site, watch=lambda *_, **__: bad)
    refusal = judge_and_promote(site.store, site.repository, watched, candidate(site, B), B)
    assert isinstance(refusal, CanaryRefusal)
    assert [e.active_draft() for e in site.replicas] == [A]
    kinds = [c.metadata["tide.kind"] for c in site.store.log(site.repository, "main") if "tide.kind" in c.metadata]
    assert [kind for kind in kinds if kind in ("release", "canary")].count("release") >= 1
    promote(site, C)
    serving = read_serving(site.store, site.repository)
    assert (serving.generation, serving.stable and serving.stable.digest, serving.canary) == (2, C, None)


LEASE = CanaryLease(draft=B, verdict="f" * 64, replicas=("r0",), run="host/1/1", lease_until=2e9)
TRIED = Serving(generation=1, stable=ServingDraft(digest=A), previous=None, canary=LEASE)
CANARY = Attestation(
    kind="canary", generation=2, draft=B, previous=A, verdict=AUTHORITY.key.sign("verdict", verdict_on(B)), at=1.0
)


@pytest.mark.parametrize(
    ("serving", "statement", "record", "why"),
    [
        (TRIED, None, metadata("canary", B, 2), r"no attestations/000002-canary\.json"),
        (TRIED, CANARY, metadata("canary", B, 3), r"no attestations/000003-canary\.json"),
        (TRIED, CANARY, metadata("canary", C, 2), "is for draft bbb"),
        (TRIED.model_copy(update={"canary": None}), CANARY, metadata("canary", B, 2), "tries draft nil"),
        (
            TRIED.model_copy(update={"stable": ServingDraft(digest=B)}),
            CANARY,
            metadata("canary", B, 2),
            "may not change",
        ),
        (TRIED.model_copy(update={"generation": 2}), CANARY, metadata("canary", B, 2), "may not change"),
        (TRIED, None, metadata("release", B, 2), "leaves no canary"),
        (WANTED, None, metadata("release", B, 2), "may not change"),
        (WANTED.model_copy(update={"canary": LEASE}), STATEMENT, metadata("rollback", B, 2), "leaves no canary"),
    ],
)
def test_the_guard_refuses_a_canary_that_would_change_what_serves(
    site: Site, serving: Serving, statement: Attestation | None, record: dict[str, str], why: str
) -> None:
    promote(site, A)
    with pytest.raises(HookRefused, match=why):
        by_hand(site, serving=serving, statement=statement, record=record)
    assert read_serving(site.store, site.repository).canary is None


def test_under_an_older_guard_a_promotion_says_how_to_renew_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    old = repositories.guard_action().replace(b"-canary.json", b".json")
    with monkeypatch.context() as patched:
        patched.setattr(repositories, "guard_action", lambda: old)
        branch = candidate(site, A)
    with pytest.raises(HookRefused, match="`tide init` renews it"):
        judge_and_promote(site.store, site.repository, site, branch, A)
    repositories.mend_drafts(site.store, site.repository)
    rollout.resume(site, AUTHORITY, branch)
    assert read_serving(site.store, site.repository).generation == 1
