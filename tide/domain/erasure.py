"""What was erased: a record without content, so that what is missing later can be explained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import Digest, Record, Value


class ErasedObject(Value):
    """One stored object that held erased rows."""

    path: str
    commit: str
    """The commit that brought it in."""
    address: str
    """Where its bytes lay in the block store."""
    digest: Digest
    """sha256 of its bytes."""
    kind: Literal["shard", "table", "manifest"]


class Erasure(Record):
    """One erasure, written before the first byte is deleted: what it takes, and what is lost with it."""

    schema_version: Literal[1] = 1
    id: str
    """Of the set of ids: the same ids give the same one."""
    repository: str
    """States repository."""
    conversations: tuple[str, ...]
    """Keyed hashes, as everywhere outside the engine."""
    requests: tuple[str, ...]
    objects: tuple[ErasedObject, ...]
    commits: tuple[str, ...]
    """Commits whose snapshot loses these objects: not reproducible from here on."""
    drafts: tuple[str, ...] = ()
    """Drafts trained from such a commit; they are listed, not changed."""
    erased_requests: int = Field(ge=0)
    other_requests: int = Field(ge=0)
    """Requests of others whose states stood in the same shards: live data keeps them, older snapshots do not."""
    rows: int = Field(ge=0)
    """Rows of states in all shards that go, those of others included."""
    at: float
    """Seconds since the epoch."""


class ErasureDone(Record):
    """The bytes of an erasure are deleted, and every ref that had them was seen to answer so."""

    schema_version: Literal[1] = 1
    erasure: Digest
    """Digest of the Erasure."""
    id: str
    objects: int = Field(ge=0)
    at: float
