"""Which stored objects hold certain conversations or requests, and which commits have them: the whole history, once.

Owns the walk: every object is looked at where it first came in, so the cost is linear in objects and commits, however
often later commits repeat them. Works over the Store port; changes nothing, knows nothing of what is done about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from pathlib import PurePosixPath

from pydantic import ValidationError

from tide.domain import Digest, ErasedObject, Record, Shard, Value
from tide.errors import BadInputError, Gone
from tide.repositories import MAIN
from tide.states import requests
from tide.states.window_branch import ROOT, TABLE
from tide.store.base import Commit, Store

_READERS = 8
"""Manifests are small: reading them is waiting."""


class Subjects(Record):
    """Whose rows are meant, by the keyed hashes that capture writes. Either names a row."""

    conversations: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Name of this set, whatever the order it was given in."""
        sets = {name: sorted(set(getattr(self, name))) for name in ("conversations", "requests")}
        return Subjects(conversations=tuple(sets["conversations"]), requests=tuple(sets["requests"])).digest()[:12]

    def name(self, request: str, conversation: str | None) -> bool:
        """True when a row of this request and conversation is meant."""
        return request in self.requests or (conversation is not None and conversation in self.conversations)


class Holding(Value):
    """An object that holds rows of the subjects, where it first came in."""

    path: str
    """Of a shard: of its manifest."""
    commit: str
    objects: tuple[ErasedObject, ...]
    """What must go: a shard and its manifest, or a request table."""
    requests: tuple[str, ...]
    """Requests of the subjects in it."""
    others: tuple[str, ...] = ()
    """Requests of others in the same shard."""
    rows: int = 0
    """Rows of states in the shard, of all its requests."""

    @property
    def prefix(self) -> str:
        """``windows/<window>/<replica>/``."""
        return "/".join(self.path.split("/")[:3]) + "/"


class Found(Value):
    """Everything that holds rows of the subjects."""

    holdings: tuple[Holding, ...]
    live: tuple[Holding, ...]
    """Those on ``main`` now."""
    commits: tuple[str, ...]
    """Commits whose tree has one of them, oldest first."""
    unmerged: tuple[str, ...]
    """Branches that bring such an object, or have it staged, and are not merged."""


def scan(store: Store, repository: str, subjects: Subjects) -> Found:
    """Look through every commit that a branch or tag leads to.

    Raises:
        NotFound: no such repository.
        BadInputError: a stored manifest or table cannot be read; names it.
    """
    logs = {ref: list(store.log(repository, ref)) for ref in _refs(store, repository)}
    commits = {commit.id: commit for log in logs.values() for commit in log}
    steps = {id: _Step(store, repository, commits[id]) for id in _oldest_first(commits)}
    new = [(id, path) for id, step in steps.items() for path in step.introduced if _is_examined(path)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="erasure-scan") as pool:
        looked = pool.map(lambda pair: _examine(store, repository, pair[0], pair[1], subjects), new)
        found = {(h.commit, h.path): h for h in looked if h is not None}
    trees = _trees(steps, found)
    on_main = {commit.id for commit in logs[MAIN]}
    return Found(
        holdings=tuple(found.values()),
        live=tuple(trees[logs[MAIN][0].id].values()),
        commits=tuple(id for id, tree in trees.items() if tree),
        unmerged=tuple(_unmerged(store, repository, subjects, logs, {h.commit for h in found.values()} - on_main)),
    )


def _refs(store: Store, repository: str) -> list[str]:
    return list(dict.fromkeys([MAIN, *store.branches(repository), *(name for name, _ in store.tags(repository))]))


def _oldest_first(commits: Mapping[str, Commit]) -> Iterator[str]:
    graph = {id: [p for p in commit.parents if p in commits] for id, commit in commits.items()}
    return iter(TopologicalSorter(graph).static_order())


class _Step:
    """What one commit changed against its first parent, and which of it no parent had."""

    def __init__(self, store: Store, repository: str, commit: Commit) -> None:
        self.parents = commit.parents
        self.removed: set[str] = set()
        self.arrived: set[str] = set()
        if not commit.parents:
            self.arrived = {item.path for item in store.list(repository, commit.id)}
            self.introduced = sorted(self.arrived)
            return
        for change in store.diff(repository, commit.parents[0], commit.id):
            (self.removed if change.kind == "removed" else self.arrived).add(change.path)
        new = set(self.arrived)
        for parent in commit.parents[1:] if new else ():
            new &= {c.path for c in store.diff(repository, parent, commit.id) if c.kind != "removed"}
        self.introduced = sorted(new)


def _trees(steps: Mapping[str, _Step], found: Mapping[tuple[str, str], Holding]) -> dict[str, dict[str, Holding]]:
    """Of every commit, oldest first: the holdings in its tree by path."""
    trees: dict[str, dict[str, Holding]] = {}
    for id, step in steps.items():
        parents = [trees.get(p, {}) for p in step.parents]
        tree = dict(parents[0]) if parents else {}
        for path in step.removed | step.arrived:
            tree.pop(path, None)
        introduced = set(step.introduced)
        for path in step.arrived:
            inherited = next((t[path] for t in parents[1:] if path in t), None)
            holding = found.get((id, path)) if path in introduced else inherited
            if holding is not None:
                tree[path] = holding
        trees[id] = tree
    return trees


def _is_examined(path: str) -> bool:
    parts = path.removeprefix(ROOT).split("/")
    is_manifest = len(parts) == 4 and path.endswith(".json")
    return path.startswith(ROOT) and (is_manifest or (len(parts) == 3 and parts[2] == TABLE))


def _examine(store: Store, repository: str, ref: str, path: str, subjects: Subjects) -> Holding | None:
    """What an object holds of the subjects; None: nothing, or its bytes are gone already."""
    try:
        data = store.read(repository, ref, path)
    except Gone:
        return None
    return (_examine_table if path.endswith(TABLE) else _examine_manifest)(store, repository, ref, path, data, subjects)


def _examine_manifest(
    store: Store, repository: str, ref: str, path: str, data: bytes, subjects: Subjects
) -> Holding | None:
    try:
        shard = Shard.model_validate_json(data)
    except ValidationError as error:
        raise BadInputError(
            f"{repository}@{ref[:12]}:{path} is no shard manifest, so nobody can say whose rows it has: "
            f"{error.errors()[0]['msg']}; take it out of the repository"
        ) from error
    named = [r.request for r in shard.requests if subjects.name(r.request, r.conversation)]
    if not named:
        return None
    file = str(PurePosixPath(path).with_suffix(".safetensors"))
    return Holding(
        path=path,
        commit=ref,
        objects=(
            _object(store, repository, ref, file, shard.name, "shard"),
            _object(store, repository, ref, path, hashlib.sha256(data).hexdigest(), "manifest"),
        ),
        requests=tuple(named),
        others=tuple(r.request for r in shard.requests if r.request not in named),
        rows=shard.rows,
    )


def _examine_table(
    store: Store, repository: str, ref: str, path: str, data: bytes, subjects: Subjects
) -> Holding | None:
    table = requests.parse_table(data, f"{repository}@{ref[:12]}:{path}")
    rows = zip(table["request"].to_pylist(), table["conversation"].to_pylist(), strict=True)
    named = [request for request, conversation in rows if subjects.name(request, conversation)]
    if not named:
        return None
    found = _object(store, repository, ref, path, hashlib.sha256(data).hexdigest(), "table")
    return Holding(path=path, commit=ref, objects=(found,), requests=tuple(named))


def _object(store: Store, repository: str, ref: str, path: str, digest: Digest, kind: str) -> ErasedObject:
    address = store.physical_address(repository, ref, path)
    return ErasedObject.model_validate(
        {"path": path, "commit": ref, "address": address, "digest": digest, "kind": kind}
    )


def _unmerged(
    store: Store, repository: str, subjects: Subjects, logs: Mapping[str, Iterable[Commit]], holding: set[str]
) -> Iterator[str]:
    """Branches whose own commits or staged objects hold rows of the subjects."""
    for branch in store.branches(repository):
        staged = (c.path for c in store.uncommitted(repository, branch) if c.kind != "removed")
        if any(commit.id in holding for commit in logs.get(branch, ())) or any(
            _examine(store, repository, branch, path, subjects) for path in staged if _is_examined(path)
        ):
            yield branch
