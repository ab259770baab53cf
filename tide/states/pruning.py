"""Old windows leave main: what is there, what live drafts were trained on, and the removal itself.

Owns the branch and the order: delete on a branch, commit with lineage, merge; then the store's garbage collection is
told how long what left is kept. Killed between any two steps, the next run completes. Works over the Store port; the
rule is tide.states.retention's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress

from tide.config import Policy
from tide.domain import DraftModel
from tide.errors import Gone, NotFound, NothingToCommit
from tide.lineage import metadata as lineage
from tide.models.candidates import POLICY_FILE
from tide.repositories import MAIN
from tide.serving import rollout
from tide.states import snapshots
from tide.states.retention import Kept, RetentionPlan, StoredWindow, decide
from tide.states.window_branch import ROOT
from tide.store.base import Store

BRANCH = "retain"
_DAY_S = 86_400.0


def plan(store: Store, states: str, drafts: str, policy: Policy, now: float) -> RetentionPlan:
    """What the policy keeps and removes of what is on main.

    Args:
        now: seconds since the epoch.

    Raises:
        NotFound: there is no states repository.
    """
    return decide(stored_windows(store, states), named_windows(store, states, drafts, policy, now), policy.retention)


def stored_windows(store: Store, states: str) -> list[StoredWindow]:
    """Windows on main with their sizes, oldest first."""
    sizes: Counter[str] = Counter()
    for item in store.list(states, MAIN, ROOT):
        sizes[item.path.removeprefix(ROOT).partition("/")[0]] += item.size
    return [StoredWindow(window=window, size=size) for window, size in sorted(sizes.items())]


def named_windows(store: Store, states: str, drafts: str, policy: Policy, now: float) -> dict[str, list[str]]:
    """Windows that the draft in serving, and the one before it, were trained on, for as long as policy says."""
    serving, days = rollout.read_serving(store, drafts), policy.retention.lineage_days
    found: dict[str, list[str]] = defaultdict(list)
    for live in (serving.stable, serving.previous):
        if live is None:
            continue
        record = rollout.read_draft(store, drafts, MAIN, live.digest)
        if days is not None and now - record.created_at > days * _DAY_S:
            continue
        for window in trained_on(store, states, drafts, record):
            found[window].append(live.digest)
    return dict(found)


def trained_on(store: Store, states: str, drafts: str, record: DraftModel) -> list[str]:
    """Windows whose shards a draft was trained on: the choice is made again, by the policy that was kept with it.

    None for a draft of other states, and for one whose snapshot lost rows: there is nothing left to keep for it. All of
    its snapshot's windows when its policy was not kept: which of them were chosen cannot be told.
    """
    if record.states_repository != states or record.states_commit is None:
        return []
    try:
        chosen = snapshots.manifests(store, states, record.states_commit, "train")
    except (Gone, NotFound):
        return []
    with suppress(NotFound):
        path = f"{rollout.draft_prefix(record.digest)}{POLICY_FILE}"
        policy = Policy.model_validate_json(store.read(drafts, MAIN, path))
        chosen = snapshots.choose_training(chosen, policy.train_tokens, policy.replay_fraction)
    return sorted({path.removeprefix(ROOT).partition("/")[0] for path, _ in chosen})


def apply(store: Store, states: str, decided: RetentionPlan, policy: Policy) -> None:
    """Remove what the plan removes from main, and set how long the store keeps it.

    Raises:
        Conflict: main changed one of these windows meanwhile; nothing was merged, run it again.
    """
    store.expire_after(states, policy.retention.collect_after_days)
    _discard_leftover(store, states)
    if decided.removed:
        _remove(store, states, decided.removed, policy)


def _discard_leftover(store: Store, states: str) -> None:
    """A killed run's branch holds removals only: nothing is lost with it."""
    if BRANCH in store.branches(states):
        store.reset(states, BRANCH)
        store.delete_branch(states, BRANCH)


def _remove(store: Store, states: str, removed: Sequence[Kept], policy: Policy) -> None:
    store.create_branch(states, BRANCH, MAIN)
    for window in removed:
        for item in list(store.list(states, BRANCH, f"{ROOT}{window.window}/")):
            store.delete(states, BRANCH, item.path)
    windows = [w.window for w in removed]
    record = lineage.retention_record(windows, sum(w.size for w in removed), policy.digest())
    message = f"retention: {len(windows)} windows leave main"
    with suppress(NothingToCommit):  # another run removed them between the plan and now
        store.commit(states, BRANCH, message, record.to_metadata())
        store.merge(states, BRANCH, MAIN, message, record.to_metadata())
    store.delete_branch(states, BRANCH)
