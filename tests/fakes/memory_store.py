"""The store port in memory, for unit tests; it passes the same contract suite as lakeFS, so it cannot drift from it.

Owns a dictionary of repositories. Knows nothing of servers; ``lose_bytes`` and ``blocks`` are there for tests only.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from typing_extensions import override

from tide.errors import AlreadyExists, Conflict, Gone, NotFound, NothingToCommit, ProtectedBranch, StoreError
from tide.store.base import Change, Commit, ObjectInfo, Store


@dataclass(frozen=True)
class _Entry:
    """An object by what it says; its bytes lie under an address of their own, as in any block store."""

    digest: str
    size: int
    address: str = field(compare=False)


Tree = dict[str, _Entry]


@dataclass
class _Branch:
    head: str
    staged: dict[str, _Entry | None] = field(default_factory=dict)


@dataclass
class _Repository:
    commits: dict[str, Commit] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, _Branch] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    protected: set[str] = field(default_factory=set)
    blocks: dict[str, bytes] = field(default_factory=dict)
    expires_after: int | None = None


class MemoryStore(Store):
    """Versions in memory."""

    def __init__(self) -> None:
        self._repositories: dict[str, _Repository] = {}
        self._ticks = 1_800_000_000

    def lose_bytes(self, repository: str, ref: str, path: str) -> None:
        """Delete an object's bytes from under its name."""
        self.erase_bytes(repository, self.physical_address(repository, ref, path))

    def blocks(self, repository: str) -> list[bytes]:
        """All bytes that lie in the block store, whether a name leads to them or not."""
        return list(self._repository(repository).blocks.values())

    @override
    def create_repository(self, repository: str) -> bool:
        _check_name("repository", repository)
        if repository in self._repositories:
            return False
        made = self._repositories[repository] = _Repository()
        made.branches["main"] = _Branch(self._commit(made, {}, "Repository created", {}, ()).id)
        return True

    @override
    def protect(self, repository: str, branch: str) -> None:
        self._repository(repository).protected.add(branch)

    @override
    def protected(self, repository: str) -> tuple[str, ...]:
        return tuple(sorted(self._repository(repository).protected))

    @override
    def repositories(self) -> Iterator[str]:
        yield from sorted(self._repositories)

    @override
    def create_branch(self, repository: str, branch: str, source: str) -> None:
        _check_name("branch", branch)
        found = self._repository(repository)
        head = self.head(repository, source).id
        if branch in found.tags:
            raise AlreadyExists(f"create branch: repository {repository}, ref {branch}: a tag has this name")
        found.branches.setdefault(branch, _Branch(head))

    @override
    def branches(self, repository: str) -> Iterator[str]:
        yield from sorted(self._repository(repository).branches)

    @override
    def delete_branch(self, repository: str, branch: str) -> None:
        found = self._branch(repository, branch)
        if branch == "main":
            raise ProtectedBranch(f"delete branch: repository {repository}, ref {branch}: it is the default branch")
        if found.staged:
            raise Conflict(f"delete branch: repository {repository}, ref {branch}: it has uncommitted objects")
        del self._repository(repository).branches[branch]

    @override
    def put(
        self, repository: str, branch: str, path: str, source: Path | bytes, *, if_absent: bool = False
    ) -> ObjectInfo:
        found = self._writable(repository, branch)
        data = source if isinstance(source, bytes) else source.read_bytes()
        if if_absent and path in self._tree(repository, branch):
            raise AlreadyExists(f"put: repository {repository}, ref {branch}, path {path}: it exists")
        address = f"memory://{repository}/{self._tick()}"
        self._repository(repository).blocks[address] = data
        found.staged[path] = _Entry(hashlib.sha256(data).hexdigest(), len(data), address)
        return ObjectInfo(path=path, size=len(data))

    @override
    @contextmanager
    def open(self, repository: str, ref: str, path: str) -> Iterator[BinaryIO]:
        yield io.BytesIO(self.read(repository, ref, path))

    @override
    def read(self, repository: str, ref: str, path: str) -> bytes:
        address = self.physical_address(repository, ref, path)
        blocks = self._repository(repository).blocks
        if address not in blocks:
            raise Gone(f"read: repository {repository}, ref {ref}, path {path}: no data")
        return blocks[address]

    @override
    def download(self, repository: str, ref: str, path: str, destination: Path) -> None:
        destination.write_bytes(self.read(repository, ref, path))

    @override
    def list(self, repository: str, ref: str, prefix: str = "") -> Iterator[ObjectInfo]:
        for path, entry in sorted(self._tree(repository, ref).items()):
            if path.startswith(prefix):
                yield ObjectInfo(path=path, size=entry.size)

    @override
    def delete(self, repository: str, branch: str, path: str) -> None:
        found = self._writable(repository, branch)
        found.staged.pop(path, None)
        if path in self._repository(repository).trees[found.head]:
            found.staged[path] = None

    @override
    def uncommitted(self, repository: str, branch: str) -> Iterator[Change]:
        found = self._branch(repository, branch)
        yield from _changes(self._repository(repository).trees[found.head], self._tree(repository, branch))

    @override
    def reset(self, repository: str, branch: str) -> None:
        self._writable(repository, branch).staged.clear()

    @override
    def commit(self, repository: str, branch: str, message: str, metadata: Mapping[str, str]) -> Commit:
        found = self._writable(repository, branch)
        if not any(self.uncommitted(repository, branch)):
            raise NothingToCommit(f"commit: repository {repository}, ref {branch}: no changes")
        tree = self._tree(repository, branch)
        made = self._commit(self._repository(repository), tree, message, metadata, (found.head,))
        found.head, found.staged = made.id, {}
        return made

    @override
    def head(self, repository: str, ref: str) -> Commit:
        found = self._repository(repository)
        return found.commits[self._resolve(repository, ref)]

    @override
    def log(self, repository: str, ref: str) -> Iterator[Commit]:
        commits = self._repository(repository).commits
        reached = self._ancestors(repository, self._resolve(repository, ref))
        yield from sorted((commits[id] for id in reached), key=lambda commit: commit.created_at, reverse=True)

    @override
    def merge(self, repository: str, source: str, into: str, message: str, metadata: Mapping[str, str]) -> Commit:
        found, branch = self._repository(repository), self._branch(repository, into)
        where = f"merge: repository {repository}, ref {source} into {into}"
        theirs, ours = self._resolve(repository, source), branch.head
        if branch.staged:
            raise Conflict(f"{where}: uncommitted changes (dirty branch)")
        base = found.trees[self._common_ancestor(repository, ours, theirs)]
        tree = _merged(base, found.trees[ours], found.trees[theirs], where)
        if tree == found.trees[ours]:
            raise NothingToCommit(f"{where}: no changes")
        made = self._commit(found, tree, message, metadata, (ours, theirs))
        branch.head = made.id
        return made

    @override
    def diff(self, repository: str, left: str, right: str) -> Iterator[Change]:
        trees = self._repository(repository).trees
        yield from _changes(trees[self._resolve(repository, left)], trees[self._resolve(repository, right)])

    @override
    def tag(self, repository: str, name: str, ref: str) -> None:
        _check_name("tag", name)
        commit = self._resolve(repository, ref)
        if name in self._repository(repository).branches:
            raise AlreadyExists(f"tag: repository {repository}, ref {name}: a branch has this name")
        found = self._repository(repository).tags.setdefault(name, commit)
        if found != commit:
            raise AlreadyExists(f"tag: repository {repository}, ref {name}: it names {found[:12]} for ever")

    @override
    def tags(self, repository: str) -> Iterator[tuple[str, str]]:
        yield from sorted(self._repository(repository).tags.items())

    @override
    def physical_address(self, repository: str, ref: str, path: str) -> str:
        tree = self._tree(repository, ref)
        if path not in tree:
            raise NotFound(f"read: repository {repository}, ref {ref}, path {path}: not found")
        return tree[path].address

    @override
    def require_erasable(self, repository: str) -> None:
        self._repository(repository)

    @override
    def erase_bytes(self, repository: str, address: str) -> bool:
        if not address.startswith(f"memory://{repository}/"):
            raise StoreError(f"erase bytes: repository {repository}: {address} is not its own")
        return self._repository(repository).blocks.pop(address, None) is not None

    @override
    def expire_after(self, repository: str, days: int) -> None:
        self._repository(repository).expires_after = days

    @override
    def expires_after(self, repository: str) -> int | None:
        return self._repository(repository).expires_after

    def _tick(self) -> int:
        """A number that was never given before, later ones higher."""
        self._ticks += 1
        return self._ticks

    def _repository(self, repository: str) -> _Repository:
        if repository not in self._repositories:
            raise NotFound(f"repository {repository}: not found")
        return self._repositories[repository]

    def _branch(self, repository: str, branch: str) -> _Branch:
        found = self._repository(repository)
        if branch not in found.branches:
            raise NotFound(f"repository {repository}, ref {branch}: branch not found")
        return found.branches[branch]

    def _writable(self, repository: str, branch: str) -> _Branch:
        found = self._branch(repository, branch)
        if branch in self._repository(repository).protected:
            raise ProtectedBranch(f"repository {repository}, ref {branch}: cannot write to protected branch")
        return found

    def _resolve(self, repository: str, ref: str) -> str:
        found = self._repository(repository)
        if ref in found.branches:
            return found.branches[ref].head
        commit = found.tags.get(ref, ref)
        if commit not in found.commits:
            raise NotFound(f"repository {repository}, ref {ref}: not found")
        return commit

    def _tree(self, repository: str, ref: str) -> Tree:
        found = self._repository(repository)
        tree = dict(found.trees[self._resolve(repository, ref)])
        for path, entry in found.branches[ref].staged.items() if ref in found.branches else ():
            if entry is None:
                tree.pop(path, None)
            else:
                tree[path] = entry
        return tree

    def _commit(
        self, repository: _Repository, tree: Tree, message: str, metadata: Mapping[str, str], parents: tuple[str, ...]
    ) -> Commit:
        at = self._tick()
        id = hashlib.sha256(f"{at}{message}{parents}".encode()).hexdigest()
        made = Commit(id=id, message=message, metadata=dict(metadata), parents=parents, created_at=float(at))
        repository.commits[id], repository.trees[id] = made, dict(tree)
        return made

    def _ancestors(self, repository: str, commit: str) -> set[str]:
        commits, reached, left = self._repository(repository).commits, set[str](), [commit]
        while left:
            id = left.pop()
            if id not in reached:
                reached.add(id)
                left.extend(commits[id].parents)
        return reached

    def _common_ancestor(self, repository: str, ours: str, theirs: str) -> str:
        commits = self._repository(repository).commits
        shared = self._ancestors(repository, ours) & self._ancestors(repository, theirs)
        return max(shared, key=lambda id: commits[id].created_at)


def _check_name(what: str, name: str) -> None:
    if not name or "/" in name:
        raise StoreError(f"create {what}: {what} {name}: names take no '/'")


def _changes(left: Tree, right: Tree) -> Iterator[Change]:
    for path in sorted(left.keys() | right.keys()):
        if left.get(path) != right.get(path):
            kind: Literal["added", "removed", "changed"] = "changed" if path in left and path in right else "added"
            yield Change(path=path, kind="removed" if path not in right else kind)


def _merged(base: Tree, ours: Tree, theirs: Tree, where: str) -> Tree:
    tree = dict(ours)
    for change in _changes(base, theirs):
        path, wanted = change.path, theirs.get(change.path)
        if ours.get(path) == wanted:
            continue
        if ours.get(path) != base.get(path):
            raise Conflict(f"{where}: both changed {path}")
        if wanted is None:
            tree.pop(path, None)
        else:
            tree[path] = wanted
    return tree
