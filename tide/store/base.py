"""The store port: repositories, branches, commits, merges and tags, as git has them, over objects.

Owns the vocabulary and the promises that every adapter keeps (tests/contract/test_store.py holds them to it).
Knows nothing of lakeFS, HTTP or what the objects mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Literal

from tide.domain import Record


class Commit(Record):
    """One immutable version of a repository."""

    id: str
    message: str
    metadata: dict[str, str]
    parents: tuple[str, ...]
    created_at: float
    """Seconds since the epoch."""


class ObjectInfo(Record):
    """One object as listed."""

    path: str
    size: int
    """Bytes."""


class Change(Record):
    """One difference between two refs."""

    path: str
    kind: Literal["added", "removed", "changed", "conflict"]


class Store(ABC):
    """A versioned object store. A ref is a branch name, a tag name or a commit id.

    Every method may raise StoreUnavailable (after its own retries), StoreUnauthorized, or NotFound for a missing
    repository, ref or path; further errors are named where they can happen. Names take no "/".
    """

    @abstractmethod
    def create_repository(self, repository: str) -> bool:
        """Create a repository with an empty ``main``; one that exists is left as it is. True when this call made it."""

    @abstractmethod
    def repositories(self) -> Iterator[str]:
        """Names of all repositories, however many pages."""

    @abstractmethod
    def protect(self, repository: str, branch: str) -> None:
        """Refuse direct writes to a branch from now on (ProtectedBranch); merges into it go on."""

    @abstractmethod
    def protected(self, repository: str) -> tuple[str, ...]:
        """Branches, or patterns of branches, that refuse direct writes."""

    @abstractmethod
    def create_branch(self, repository: str, branch: str, source: str) -> None:
        """Branch from a ref; one that exists is left where it is."""

    @abstractmethod
    def branches(self, repository: str) -> Iterator[str]:
        """Names of all branches."""

    @abstractmethod
    def delete_branch(self, repository: str, branch: str) -> None:
        """Delete a branch. Raises Conflict when it has uncommitted objects: they would vanish in silence."""

    @abstractmethod
    def put(
        self, repository: str, branch: str, path: str, source: Path | bytes, *, if_absent: bool = False
    ) -> ObjectInfo:
        """Write one object, streamed when it is a file. With ``if_absent`` raises AlreadyExists, never rewrites."""

    @abstractmethod
    def open(self, repository: str, ref: str, path: str) -> AbstractContextManager[BinaryIO]:
        """Read one object as a stream. Raises Gone when its bytes were deleted."""

    @abstractmethod
    def read(self, repository: str, ref: str, path: str) -> bytes:
        """Read one small object whole."""

    @abstractmethod
    def download(self, repository: str, ref: str, path: str, destination: Path) -> None:
        """Stream one object to a file: temporary name, fsync, rename."""

    @abstractmethod
    def list(self, repository: str, ref: str, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects under a prefix, in path order, however many pages."""

    @abstractmethod
    def delete(self, repository: str, branch: str, path: str) -> None:
        """Stage the removal of one object; a missing one is fine."""

    @abstractmethod
    def uncommitted(self, repository: str, branch: str) -> Iterator[Change]:
        """Staged changes of a branch."""

    @abstractmethod
    def reset(self, repository: str, branch: str) -> None:
        """Drop all staged changes of a branch."""

    @abstractmethod
    def commit(self, repository: str, branch: str, message: str, metadata: Mapping[str, str]) -> Commit:
        """Commit what is staged. Raises NothingToCommit, ProtectedBranch."""

    @abstractmethod
    def head(self, repository: str, ref: str) -> Commit:
        """The commit a ref points at."""

    @abstractmethod
    def log(self, repository: str, ref: str) -> Iterator[Commit]:
        """Commits from a ref back to the beginning, newest first."""

    @abstractmethod
    def merge(self, repository: str, source: str, into: str, message: str, metadata: Mapping[str, str]) -> Commit:
        """Merge a ref into a branch. Raises Conflict (nothing merged), HookRefused, NothingToCommit."""

    @abstractmethod
    def diff(self, repository: str, left: str, right: str) -> Iterator[Change]:
        """What changes when going from ``left`` to ``right``."""

    @abstractmethod
    def tag(self, repository: str, name: str, ref: str) -> None:
        """Name a commit for ever. Raises AlreadyExists when the name points elsewhere; never moves a tag."""

    @abstractmethod
    def tags(self, repository: str) -> Iterator[tuple[str, str]]:
        """All tags as (name, commit id)."""

    # Bytes behind the versions

    @abstractmethod
    def physical_address(self, repository: str, ref: str, path: str) -> str:
        """Where an object's bytes lie in the block store; objects with one address share their bytes."""

    @abstractmethod
    def require_erasable(self, repository: str) -> None:
        """Check that ``erase_bytes`` can work from here.

        Raises:
            ConfigError: the block store is not reachable from here; says which settings it takes.
        """

    @abstractmethod
    def erase_bytes(self, repository: str, address: str) -> bool:
        """Delete the bytes at a physical address for ever: every ref that has them answers Gone. Again is harmless.

        Returns:
            True when there were bytes.

        Raises:
            ConfigError: the block store is not reachable from here.
            StoreError: the address is not in the repository's own part of the block store.
        """

    @abstractmethod
    def expire_after(self, repository: str, days: int) -> None:
        """Let the store's garbage collection take bytes that no branch has had for so many days."""

    @abstractmethod
    def expires_after(self, repository: str) -> int | None:
        """Days set by ``expire_after``; None when nothing may be collected."""
