"""Snapshots: what a commit of states holds, and getting the parts of it that a stage may read.

Owns the layout inside the states repository (``windows/<window>/<replica>/{train,held_out}/``, ``requests.parquet``)
as readers see it, and the choice of training shards. Works over the Store port; knows nothing of lakeFS or training.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tide.domain import Shard, Snapshot, Split, TargetContract, split_of
from tide.errors import ContractMismatch, NotFound
from tide.states.window_branch import ROOT
from tide.store.base import Store

_READERS = 8
"""Manifests are small: reading them is waiting."""
_TABLE = "/requests.parquet"


def manifests(store: Store, repository: str, ref: str, *folders: str) -> list[tuple[str, Shard]]:
    """Manifests of all shards of these folders (``train``, ``held_out``), oldest first, as (object path, manifest)."""
    return _manifests(store, repository, ref, (item.path for item in store.list(repository, ref, ROOT)), folders)


def _manifests(
    store: Store, repository: str, ref: str, paths: Iterable[str], folders: Sequence[str]
) -> list[tuple[str, Shard]]:
    def read(path: str) -> tuple[str, Shard]:
        manifest = Shard.model_validate_json(store.read(repository, ref, path))
        return path.removesuffix(".json") + ".safetensors", manifest

    wanted = [path for path in paths if _folder(path) in folders and path.endswith(".json")]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="manifests") as pool:
        found = list(pool.map(read, wanted))
    return sorted(found, key=lambda pair: (pair[1].closed_at, pair[1].name))


def _folder(path: str) -> str:
    """``train`` or ``held_out`` of ``windows/<window>/<replica>/<folder>/<name>``; nothing for what is no shard."""
    parts = path.removeprefix(ROOT).split("/")
    return parts[2] if len(parts) == 4 else ""


def describe(store: Store, repository: str, ref: str = "main") -> Snapshot:
    """Pin a ref to its commit and say what it holds.

    Raises:
        NotFound: nothing was harvested yet.
        ContractMismatch: shards of two targets stand in one snapshot; a changed target starts a new lineage.
    """
    commit = store.head(repository, ref).id
    paths = [item.path for item in store.list(repository, commit, ROOT)]
    shards = [manifest for _, manifest in _manifests(store, repository, commit, paths, ("train", "held_out"))]
    if not shards:
        raise NotFound(f"{repository}@{ref} holds no shards: serve some traffic and run the harvest first")
    windows = sorted({path.removeprefix(ROOT).split("/")[0] for path in paths})
    return Snapshot(
        repository=repository,
        commit=commit,
        target=_one_target(repository, shards),
        windows=tuple(windows),
        shards=len(shards),
        requests=sum(len(s.requests) for s in shards),
        rows=sum(s.rows for s in shards),
        drafts=tuple(sorted({r.draft for s in shards for r in s.requests})),
    )


def _one_target(repository: str, shards: Sequence[Shard]) -> TargetContract:
    first = shards[0].target
    for shard in shards:
        if parts := first.differences(shard.target):
            raise ContractMismatch(f"{repository}: shard {shard.name[:12]}: target", parts)
    return first


def choose_training(
    shards: Sequence[tuple[str, Shard]], train_tokens: int, replay_fraction: float
) -> list[tuple[str, Shard]]:
    """The newest ``train_tokens`` rows, of which ``replay_fraction`` come from older shards spread evenly.

    Args:
        shards: (path, manifest) of the ``train`` folder, oldest first.
    """
    fresh, rows = [], 0
    budget = int(train_tokens * (1 - replay_fraction))
    rest = list(shards)
    while rest and rows < budget:
        fresh.append(rest.pop())
        rows += fresh[-1][1].rows
    replayed, kept = int(train_tokens * replay_fraction), []
    older = rest[:: max(1, sum(s.rows for _, s in rest) // max(1, replayed))] if replayed else []
    for pair in older:
        if replayed <= 0:
            break
        kept.append(pair)
        replayed -= pair[1].rows
    return kept + fresh[::-1]


def choose_held_out(shards: Sequence[tuple[str, Shard]], split: Split, requests: int) -> list[tuple[str, Shard]]:
    """The newest held-out shards that together hold this many requests of a split, oldest first; all when too few."""
    chosen: list[tuple[str, Shard]] = []
    found = 0
    for pair in reversed(shards):
        if found >= requests:
            break
        own = sum(split_of(r.conversation) is split for r in pair[1].requests)
        if own:
            chosen.append(pair)
            found += own
    return chosen[::-1]


def fetch_training(
    store: Store, repository: str, commit: str, destination: Path, *, train_tokens: int, replay_fraction: float
) -> tuple[Path, ...]:
    """Local copies of the shards to train on; ``held_out`` is never listed."""
    chosen = choose_training(manifests(store, repository, commit, "train"), train_tokens, replay_fraction)
    return tuple(fetch(store, repository, commit, chosen, destination))


def fetch_held_out(
    store: Store, repository: str, commit: str, destination: Path, *, split: Split, requests: int
) -> tuple[Path, ...]:
    """Local copies of the newest held-out shards with this many requests of a split; ``train`` is never read."""
    chosen = choose_held_out(manifests(store, repository, commit, "held_out"), split, requests)
    return tuple(fetch(store, repository, commit, chosen, destination))


def content_digest(store: Store, repository: str, commit: str) -> str:
    """sha256 over the names of all shards, which are digests of their content: the same in any store, at any commit."""
    names = sorted(m.name for _, m in manifests(store, repository, commit, "train", "held_out"))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def fetch(
    store: Store, repository: str, commit: str, chosen: Sequence[tuple[str, Shard]], destination: Path
) -> list[Path]:
    """Download shards, each with its manifest beside it; what is there by digest is not fetched again."""
    destination.mkdir(parents=True, exist_ok=True)
    local = []
    for path, manifest in chosen:
        file = destination / manifest.file
        if not file.with_suffix(".json").exists():
            store.download(repository, commit, path, file)
            store.download(repository, commit, path.removesuffix(".safetensors") + ".json", file.with_suffix(".json"))
        local.append(file)
    return local


def fetch_request_tables(
    store: Store, repository: str, commit: str, destination: Path, *, since: float = 0.0
) -> list[Path]:
    """Download the request tables of a commit, oldest window first.

    Args:
        since: leave out windows that began more than a day before this time, seconds since the epoch. Windows are
            named by their start; a day is longer than any window.
    """
    oldest = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(max(0.0, since - 86_400)))
    destination.mkdir(parents=True, exist_ok=True)
    local = []
    for item in store.list(repository, commit, ROOT):
        window = item.path.removeprefix(ROOT).split("/")[0]
        if item.path.endswith(_TABLE) and window >= oldest:
            file = destination / item.path.removeprefix(ROOT).replace("/", "-")
            if not file.exists():
                store.download(repository, commit, item.path, file)
            local.append(file)
    return local


def replica_of(table: Path) -> str:
    """The replica whose requests a file of ``fetch_request_tables`` holds."""
    return table.name.removesuffix(_TABLE.replace("/", "-")).partition("-")[2]
