"""Reads back everything that harvests were to bring in: is each file in exactly one place and one commit, whole?

Knows nothing of how the harvest works: only the layout of the repository and the format of its files.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pyarrow.parquet as pq

from tide.domain import LineageRecord, RequestSegment, Shard
from tide.store.base import Store


@dataclass
class Delivered:
    """What was put into spools: good files only."""

    shards: set[str] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    windows: Counter[str] = field(default_factory=Counter)
    """How often files came for ``window/replica``: each time makes one commit at most."""


@dataclass
class ReadBack:
    """What is wrong with what is stored; empty lists when nothing is."""

    lost: list[str]
    doubled: list[str]
    shards: int
    requests: int
    commits: int


def spooled(*spools: Path) -> set[str]:
    """Names of shards and segments that lie complete in spools."""
    found = set[str]()
    for spool in spools:
        for folder, kind in (("train", Shard), ("held_out", Shard), ("requests", RequestSegment)):
            for path in (spool / folder).glob("[!.]*.json"):
                manifest = kind.model_validate_json(path.read_bytes())
                if (spool / folder / manifest.file).exists():
                    found.add(manifest.name)
    return found


def read_back(store: Store, repository: str, delivered: Delivered) -> ReadBack:
    """Read every byte at main, and every commit that led there."""
    paths = [item.path for item in store.list(repository, "main")]
    places = Counter(PurePosixPath(p).stem for p in paths if p.endswith(".safetensors"))
    whole = {PurePosixPath(p).stem for p in paths if p.endswith(".safetensors") and _whole(store, repository, p)}
    requests = Counter(r for p in paths if p.endswith("/requests.parquet") for r in _requests(store, repository, p))
    added, subjects = _commits(store, repository)
    lost = [f"shard {name[:12]}" for name in sorted(delivered.shards - whole)]
    lost += [f"request {name[-8:]}" for name in sorted(delivered.requests - requests.keys())]
    doubled = [f"shard {n[:12]} at {c} places" for n, c in places.items() if c > 1]
    doubled += [f"shard {n[:12]} in {c} commits" for n, c in added.items() if c > 1]
    doubled += [f"request {n[-8:]} {c} times" for n, c in requests.items() if c > 1]
    doubled += [f"window {w} in {c} commits" for w, c in subjects.items() if c > max(1, delivered.windows[w])]
    return ReadBack(lost, doubled, len(places), len(requests), sum(subjects.values()))


def _whole(store: Store, repository: str, path: str) -> bool:
    """Whether the bytes are those of the name, and the manifest beside them is theirs."""
    digest = hashlib.sha256()
    with store.open(repository, "main", path) as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    manifest = Shard.model_validate_json(store.read(repository, "main", path.removesuffix(".safetensors") + ".json"))
    return digest.hexdigest() == manifest.name == PurePosixPath(path).stem


def _requests(store: Store, repository: str, path: str) -> Iterable[str]:
    table = pq.read_table(io.BytesIO(store.read(repository, "main", path)), columns=["request"])
    names: list[str] = table["request"].to_pylist()
    return names


def _commits(store: Store, repository: str) -> tuple[Counter[str], Counter[str]]:
    """In how many commits each shard was added, and how many commits each ``window/replica`` has; merges left out."""
    added, subjects = Counter[str](), Counter[str]()
    for commit in store.log(repository, "main"):
        record = LineageRecord.from_metadata(dict(commit.metadata))
        if record is None or len(commit.parents) != 1:
            continue
        subjects[record.subject] += 1
        for change in store.diff(repository, commit.parents[0], commit.id):
            if change.kind != "removed" and change.path.endswith(".safetensors"):
                added[PurePosixPath(change.path).stem] += 1
    return added, subjects
