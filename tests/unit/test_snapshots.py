"""Snapshots: one target, and each stage gets the shards it may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.support.tiny import TARGET, request_info
from tests.unit.test_shards import states
from tide.domain import Shard, ShardRequest, Split, TargetContract
from tide.errors import ContractMismatch, NotFound
from tide.states import snapshots
from tide.states.shards import write_shard

REPOSITORY = "svc-states"


def manifest(name: str, rows: int, *requests: ShardRequest) -> tuple[str, Shard]:
    digest = name * 64
    shard = Shard(
        name=digest,
        split="train",
        target=TARGET,
        rows=rows,
        size=1,
        requests=requests,
        opened_at=0.0,
        closed_at=float(ord(name)),
    )
    return f"{digest}.safetensors", shard


def put(
    store: MemoryStore, folder: Path, window: str, split: Split, target: TargetContract = TARGET, seed: int = 0
) -> Shard:
    made = states(f"{window}-{split}-{seed}", 3, 4, seed=seed)
    shard = write_shard(folder, [made], split=split, target=target, opened_at=0.0, closed_at=float(seed))
    for name in (shard.file, f"{shard.name}.json"):
        store.put(REPOSITORY, "main", f"windows/{window}/r0/{split.folder}/{name}", folder / name)
    store.put(REPOSITORY, "main", f"windows/{window}/r0/requests.parquet", window.encode())
    return shard


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.create_repository(REPOSITORY)
    return store


def test_a_snapshot_pins_a_commit_and_counts_what_it_holds(store: MemoryStore, tmp_path: Path) -> None:
    put(store, tmp_path, "20260101T000000Z", Split.TRAIN, seed=1)
    put(store, tmp_path, "20260101T000500Z", Split.GATE, seed=2)
    commit = store.commit(REPOSITORY, "main", "harvest", {})
    found = snapshots.describe(store, REPOSITORY)
    assert (found.commit, found.shards, found.requests, found.rows) == (commit.id, 2, 2, 12)
    assert found.windows == ("20260101T000000Z", "20260101T000500Z")
    assert found.target == TARGET


def test_an_empty_repository_says_what_to_do(store: MemoryStore) -> None:
    with pytest.raises(NotFound, match="run the harvest"):
        snapshots.describe(store, REPOSITORY)


def test_two_targets_in_one_snapshot_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    put(store, tmp_path, "w1", Split.TRAIN, seed=1)
    put(store, tmp_path, "w2", Split.TRAIN, TARGET.model_copy(update={"weights": "d" * 64}), seed=2)
    store.commit(REPOSITORY, "main", "harvest", {})
    with pytest.raises(ContractMismatch, match="weights"):
        snapshots.describe(store, REPOSITORY)


def test_training_lists_no_held_out_shard(store: MemoryStore, tmp_path: Path) -> None:
    train = put(store, tmp_path, "w1", Split.TRAIN, seed=1)
    put(store, tmp_path, "w1", Split.GATE, seed=2)
    store.commit(REPOSITORY, "main", "harvest", {})
    listed = snapshots.manifests(store, REPOSITORY, "main", "train")
    assert [m.name for _, m in listed] == [train.name]
    local = snapshots.fetch(store, REPOSITORY, "main", listed, tmp_path / "cache")
    assert [p.name for p in local] == [train.file]
    assert local[0].with_suffix(".json").exists()


def test_the_newest_rows_are_trained_on_with_a_share_of_older_ones() -> None:
    shards = [manifest(name, 100) for name in "0123456789"]
    chosen = [s.name[0] for _, s in snapshots.choose_training(shards, 400, 0.25)]
    assert chosen[-3:] == ["7", "8", "9"]
    assert set(chosen[:-3]) < set("0123456")
    assert len(chosen) == 4


def test_without_replay_only_the_newest_are_trained_on() -> None:
    shards = [manifest(name, 100) for name in "0123"]
    assert [s.name[0] for _, s in snapshots.choose_training(shards, 200, 0.0)] == ["2", "3"]


def test_all_is_trained_on_when_there_is_less_than_asked_for() -> None:
    shards = [manifest(name, 100) for name in "012"]
    assert len(snapshots.choose_training(shards, 10_000, 0.1)) == 3


def test_a_gate_generation_is_the_newest_gate_requests() -> None:
    gate, selection = request_info("g", Split.GATE), request_info("s", Split.SELECTION)
    shards = [manifest("0", 9, gate, gate), manifest("1", 9, selection), manifest("2", 9, gate), manifest("3", 9, gate)]
    chosen = snapshots.choose_held_out(shards, Split.GATE, 2)
    assert [s.name[0] for _, s in chosen] == ["2", "3"]
    assert [s.name[0] for _, s in snapshots.choose_held_out(shards, Split.SELECTION, 5)] == ["1"]


def test_request_tables_long_before_the_promotion_are_not_fetched(store: MemoryStore, tmp_path: Path) -> None:
    put(store, tmp_path, "19700101T000000Z", Split.TRAIN, seed=1)
    put(store, tmp_path, "19700110T000000Z", Split.TRAIN, seed=2)
    store.commit(REPOSITORY, "main", "harvest", {})
    every = snapshots.fetch_request_tables(store, REPOSITORY, "main", tmp_path / "a")
    recent = snapshots.fetch_request_tables(store, REPOSITORY, "main", tmp_path / "b", since=9 * 86_400.0)
    assert [p.read_bytes().decode() for p in every] == ["19700101T000000Z", "19700110T000000Z"]
    assert [p.read_bytes().decode() for p in recent] == ["19700110T000000Z"]


def test_a_request_table_says_which_replica_it_is_of(store: MemoryStore, tmp_path: Path) -> None:
    for replica in ("r0", "eu-west-1"):
        store.put(REPOSITORY, "main", f"windows/20260101T000000Z/{replica}/requests.parquet", b"rows")
    store.commit(REPOSITORY, "main", "harvest", {})
    found = snapshots.fetch_request_tables(store, REPOSITORY, "main", tmp_path)
    assert sorted(map(snapshots.replica_of, found)) == ["eu-west-1", "r0"]
