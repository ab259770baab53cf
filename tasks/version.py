"""Version: pin what was harvested, so that every later stage speaks of one commit."""

from __future__ import annotations

from pathlib import Path

from tasks.stage import cache_folder, stage
from tide import wiring
from tide.domain import Snapshot, Split
from tide.states import snapshots


@stage("pin snapshot")
def pin_snapshot(ref: str = "main") -> Snapshot:
    """The states commit a ref points at now, and what it holds."""
    config = wiring.settings()
    return snapshots.describe(wiring.store(config), config.states_repository, ref)


@stage("fetch training shards")
def fetch_training_shards(snapshot: Snapshot) -> tuple[Path, ...]:
    """Local copies of the shards this policy trains on; ``held_out`` is never listed."""
    config = wiring.settings()
    policy = config.policy()
    return snapshots.fetch_training(
        wiring.store(config),
        snapshot.repository,
        snapshot.commit,
        cache_folder("train"),
        train_tokens=policy.train_tokens,
        replay_fraction=policy.replay_fraction,
    )


@stage("fetch held-out shards")
def fetch_held_out_shards(snapshot: Snapshot, split: Split, requests: int) -> tuple[Path, ...]:
    """Local copies of the newest held-out shards with this many requests of a split; ``train`` is never read."""
    store = wiring.store(wiring.settings())
    folder = cache_folder("held_out")
    return snapshots.fetch_held_out(store, snapshot.repository, snapshot.commit, folder, split=split, requests=requests)
