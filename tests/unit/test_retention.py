"""Retention: the limits, what a live draft names, the budget that nothing else may exceed, and runs that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.crashing_store import Crash, CrashPoint, crashing
from tests.fakes.memory_store import MemoryStore
from tests.support.erasing import NOW, harvest
from tests.support.spooled import START, WINDOW_S, add_segment, add_shard
from tests.support.tiny import TARGET as DRAFT_TARGET
from tests.support.tiny import tiny_draft
from tide.config import Policy, RetentionPolicy
from tide.domain import DraftModel, LineageRecord, Serving, ServingDraft
from tide.models.candidates import POLICY_FILE
from tide.models.draft_files import load_draft
from tide.serving.serving_file import SERVING, draft_prefix
from tide.states import pruning, snapshots
from tide.states.retention import StoredWindow, decide, to_markdown
from tide.states.spool import window_of

STATES, DRAFTS = "svc-states", "svc-drafts"
WINDOWS = [window_of(START + i * WINDOW_S, WINDOW_S) for i in range(6)]


def kept(sizes: list[int], named: dict[str, list[str]] | None = None, **limits: int) -> str:
    """One letter a window, newest first: k for kept, . for removed."""
    windows = [StoredWindow(window=f"w{i}", size=size) for i, size in enumerate(reversed(sizes))]
    return "".join("k" if w.keep else "." for w in decide(windows, named or {}, RetentionPolicy(**limits)).windows)


def test_without_a_limit_everything_stays() -> None:
    assert kept([10, 10, 10]) == "kkk"
    assert not RetentionPolicy().limited


def test_the_newest_windows_stay() -> None:
    assert kept([10, 10, 10, 10], keep_windows=2) == "kk.."


def test_the_newest_bytes_stay_as_one_stretch_of_time() -> None:
    assert kept([10, 10, 30, 1], max_bytes=25) == "kk.."
    assert kept([30, 1], max_bytes=25) == "..", "a window above the whole budget does not stay for being the newest"


def test_the_narrower_of_two_limits_holds() -> None:
    assert kept([10, 10, 10], keep_windows=2, max_bytes=10) == "k.."
    assert kept([10, 10, 10], keep_windows=1, max_bytes=100) == "k.."


def test_what_a_live_draft_names_stays_and_counts_first() -> None:
    assert kept([10, 10, 10, 10], {"w0": ["d"]}, max_bytes=20) == "k..k"
    assert kept([10, 10, 10, 10], {"w0": ["d"]}, keep_windows=2) == "kk.k"


def test_what_is_over_the_budget_is_reported() -> None:
    windows = [StoredWindow(window=f"w{i}", size=10) for i in range(4)]
    policy = RetentionPolicy(max_bytes=15)
    plan = decide(windows, {"w0": ["a" * 64], "w1": ["a" * 64]}, policy)
    assert plan.over_bytes == 5
    assert [w.window for w in plan.removed] == ["w2", "w3"]
    text = to_markdown(plan, policy)
    assert "**5 bytes over max_bytes stay" in text
    assert f"| w0 | 10 | kept | draft {'a' * 12} was trained on it |" in text
    assert "| w3 | 10 | removed | beyond 15 bytes |" in text


@given(
    sizes=st.lists(st.integers(0, 100), max_size=20),
    pinned=st.sets(st.integers(0, 19)),
    budget=st.integers(1, 500),
)
def test_nothing_above_the_budget_stays_but_what_a_live_draft_names(
    sizes: list[int], pinned: set[int], budget: int
) -> None:
    windows = [StoredWindow(window=f"w{i:02d}", size=size) for i, size in enumerate(sizes)]
    named = {f"w{i:02d}": ["d"] for i in pinned}
    plan = decide(windows, named, RetentionPolicy(max_bytes=budget))
    stays = sum(w.size for w in plan.windows if w.keep)
    must = sum(w.size for w in windows if w.window in named)
    assert stays <= max(budget, must)
    assert plan.over_bytes == max(0, must - budget)
    assert {w.window for w in plan.removed}.isdisjoint(named)
    others = "".join("k" if w.keep else "." for w in plan.windows if w.window not in named)
    assert ".k" not in others, "what stays of the others is the newest stretch"


# On a store


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """Six harvested windows; the draft in serving was trained on the newest two of the first three."""
    store, spool = MemoryStore(), tmp_path / "spool"
    for i in range(6):
        add_shard(spool, 10 + i, at=START + i * WINDOW_S + 1)
        add_segment(spool, 10 + i, at=START + i * WINDOW_S + 2)
        harvest(store, STATES, spool, NOW + i * WINDOW_S)
        if i == 2:
            commit = store.head(STATES, "main").id
    _serve(store, tmp_path, commit)
    return store


def _serve(store: MemoryStore, folder: Path, commit: str) -> None:
    draft = load_draft(tiny_draft(folder / "drafts"))
    policy = Policy(train_tokens=48, replay_fraction=0.0)
    record = DraftModel(
        digest=draft.digest,
        contract=draft.contract,
        target=DRAFT_TARGET,
        states_repository=STATES,
        states_commit=commit,
        created_at=NOW,
    )
    store.create_repository(DRAFTS)
    serving = Serving(generation=1, stable=ServingDraft(digest=draft.digest))
    for name, content in (
        (f"{draft_prefix(draft.digest)}draft.json", record),
        (f"{draft_prefix(draft.digest)}{POLICY_FILE}", policy),
        (SERVING, serving),
    ):
        store.put(DRAFTS, "main", name, content.to_json().encode())
    store.commit(DRAFTS, "main", "promotion", {})


def run(store: MemoryStore, now: float = NOW, **limits: int) -> list[str]:
    """Windows left on main."""
    policy = Policy(retention=RetentionPolicy(**limits))
    pruning.apply(store, STATES, pruning.plan(store, STATES, DRAFTS, policy, now), policy)
    return [w.window for w in pruning.stored_windows(store, STATES)]


def test_a_byte_budget_holds_on_main_but_for_the_windows_of_the_serving_draft(store: MemoryStore) -> None:
    sizes = {w.window: w.size for w in pruning.stored_windows(store, STATES)}
    budget = sizes[WINDOWS[1]] + sizes[WINDOWS[2]] + sizes[WINDOWS[5]]
    assert run(store, max_bytes=budget) == [WINDOWS[1], WINDOWS[2], WINDOWS[5]]
    assert sum(w.size for w in pruning.stored_windows(store, STATES)) <= budget
    assert run(store, max_bytes=1) == [WINDOWS[1], WINDOWS[2]]


def test_a_draft_names_its_windows_for_as_long_as_policy_says(store: MemoryStore) -> None:
    assert run(store, NOW + 5 * 86_400, keep_windows=1, lineage_days=5) == [WINDOWS[1], WINDOWS[2], WINDOWS[5]]
    assert run(store, NOW + 5 * 86_400 + 1, keep_windows=1, lineage_days=5) == [WINDOWS[5]]


def test_what_left_main_is_read_at_older_commits_and_the_removal_has_its_lineage(store: MemoryStore) -> None:
    before = store.head(STATES, "main").id
    run(store, keep_windows=2)
    assert snapshots.describe(store, STATES, before).shards == 6
    record = LineageRecord.from_metadata(store.head(STATES, "main").metadata)
    assert record is not None
    assert (record.kind, record.facts["windows"]) == ("retention", f"{WINDOWS[0]},{WINDOWS[3]}")
    assert list(store.branches(STATES)) == ["main"]


def test_the_stores_garbage_collection_follows_the_policy(store: MemoryStore) -> None:
    run(store, collect_after_days=9)
    assert store.expires_after(STATES) == 9


def test_again_nothing_is_removed_and_nothing_committed(store: MemoryStore) -> None:
    run(store, keep_windows=2)
    head = store.head(STATES, "main").id
    run(store, keep_windows=2)
    assert store.head(STATES, "main").id == head


def test_a_draft_whose_snapshot_lost_rows_names_nothing(store: MemoryStore) -> None:
    commit = store.head(STATES, "main").id
    for item in store.list(STATES, commit, f"windows/{WINDOWS[0]}/r0/train/"):
        store.lose_bytes(STATES, commit, item.path)
    assert run(store, keep_windows=1) == [WINDOWS[5]]


def test_killed_again_and_again_the_run_that_lives_completes(store: MemoryStore) -> None:
    policy, at = Policy(retention=RetentionPolicy(keep_windows=5)), 0
    while True:
        try:
            broken = crashing(store, CrashPoint(at))
            pruning.apply(broken, STATES, pruning.plan(broken, STATES, DRAFTS, policy, NOW), policy)
        except Crash:
            at += 7
        else:
            break
    assert at > 7
    assert [w.window for w in pruning.stored_windows(store, STATES)] == WINDOWS[1:]
    assert list(store.branches(STATES)) == ["main"]
