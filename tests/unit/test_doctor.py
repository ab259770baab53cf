"""The doctor finds each thing that is wrong, says how to mend it, and never stops at the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.signed import KEY, STRANGER
from tests.unit.test_rollout import A, promote, store_with
from tide import repositories
from tide.config import Settings
from tide.errors import EngineUnavailable
from tide.signatures import keys
from tide.watching import doctor
from tide.watching.findings import Check

STATES, DRAFTS = "svc-states", "svc-drafts"


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "contract.json").write_text("{}")
    return Settings(service="svc", home=tmp_path, public_keys=KEY.public)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    repositories.ensure(store, STATES)
    repositories.ensure_drafts(store, DRAFTS)
    return store


def wrong(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if check.state != "ok"}


def test_a_fresh_service_is_well(config: Settings, store: MemoryStore) -> None:
    assert wrong(doctor.examine(config, store, [FakeEngine("r0")])) == {}


def test_missing_repositories_and_a_missing_bundle_each_say_what_makes_them(tmp_path: Path) -> None:
    checks = doctor.examine(Settings(service="svc", home=tmp_path), MemoryStore(), [])
    assert set(wrong(checks)) == {"target bundle", f"repository {STATES}", f"repository {DRAFTS}", "keys"}
    assert all(check.fix for check in checks if check.state == "wrong")


def test_an_unprotected_main_is_found_and_init_mends_it(config: Settings) -> None:
    store = MemoryStore()
    for repository in (STATES, DRAFTS):
        store.create_repository(repository)
    assert wrong(doctor.examine(config, store, [])) == {
        f"repository {STATES}": "main takes direct writes",
        f"repository {DRAFTS}": "main takes direct writes",
        "guard": f"{DRAFTS}@main has no {repositories.GUARD}, or an older one",
    }
    repositories.mend(store, STATES)
    repositories.mend_drafts(store, DRAFTS)
    assert wrong(doctor.examine(config, store, [])) == {}


def test_a_commit_made_by_hand_on_main_is_named_and_one_of_ours_is_not(config: Settings, store: MemoryStore) -> None:
    for branch, metadata in (("ours", {"tide.kind": "states", "tide.subject": "w"}), ("mine", {})):
        store.create_branch(STATES, branch, "main")
        store.put(STATES, branch, branch, b"")
        store.commit(STATES, branch, f"by {branch}", metadata)
        store.merge(STATES, branch, "main", f"by {branch}", metadata)
    details = [c.detail for c in doctor.examine(config, store, []) if c.state == "wrong"]
    assert len(details) == 2, "its commit and its merge"
    assert all("by mine" in detail for detail in details)


def test_a_replica_that_serves_another_draft_and_one_that_is_down_are_both_named(
    config: Settings, tmp_path: Path
) -> None:
    store = store_with(A)
    repositories.mend(store, DRAFTS)
    repositories.ensure(store, STATES)
    good, stale, down = FakeEngine("good"), FakeEngine("stale"), FakeEngine("down")
    promote(store, A, [good], tmp_path, 0)

    def unreachable() -> str:
        raise EngineUnavailable("down: connection refused")

    down.active_draft = unreachable  # type: ignore[method-assign]
    found = {c.name: c for c in doctor.examine(config, store, [good, stale, down])}
    assert found["replica good"].state == "ok"
    assert (found["replica stale"].state, found["replica stale"].fix) == ("wrong", "`tide reconcile`")
    assert (found["replica down"].state, "refused" in found["replica down"].detail) == ("unknown", True)
    assert "draft.json is no DraftModel" in found["serving.json"].detail, "the stub of test_rollout is no record"


def test_a_policy_that_cannot_be_read_does_not_hide_the_rest(config: Settings, store: MemoryStore) -> None:
    broken = config.model_copy(update={"policy_file": Path("/nowhere/policy.yaml")})
    assert set(wrong(doctor.examine(broken, store, []))) == {"policy"}


def test_a_signing_key_that_nobody_trusts_is_found(config: Settings, store: MemoryStore) -> None:
    path, key = keys.ensure(config.home)
    signing = config.model_copy(update={"signing_key_file": path})
    assert "does not trust it" in wrong(doctor.examine(signing, store, []))["keys"]
    trusted = signing.model_copy(update={"public_keys": f"{STRANGER.public},{key.public}"})
    assert wrong(doctor.examine(trusted, store, [])) == {}
    path.chmod(0o644)
    assert "chmod 600" in wrong(doctor.examine(trusted, store, []))["keys"]
