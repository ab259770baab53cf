"""What was captured: shards, pieces of the request table, windows, snapshots."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import Digest, Record, TargetContract

PROBE_SLICE = "tide-probe"
"""Slice of the requests that TIDE itself sends, to profile an engine or to see that it generates: in the request table,
but no traffic of the service's users."""


class ShardRequest(Record):
    """One request inside a shard, in the order of its rows."""

    request: str
    conversation: str
    slice: str
    draft: str
    """Digest of the draft that served it, ``none`` or ``mixed``: provenance, never compared."""
    sampling: Literal["greedy", "sampled", "unknown"] = "unknown"


class Shard(Record):
    """Manifest of one shard. It is written last: a file without a manifest does not exist."""

    schema_version: Literal[1] = 1
    name: Digest
    """sha256 of the safetensors file; the file is ``<name>.safetensors``."""
    split: Literal["train", "held_out"]
    target: TargetContract
    rows: int = Field(ge=0)
    size: int = Field(ge=0)
    requests: tuple[ShardRequest, ...]
    opened_at: float
    closed_at: float
    chat_template: str = ""
    engine: str = ""

    @property
    def file(self) -> str:
        """Name of the safetensors file."""
        return f"{self.name}.safetensors"


class RequestSegment(Record):
    """Manifest of one piece of the request table: every request that finished between two closings."""

    schema_version: Literal[1] = 1
    name: Digest
    """sha256 of the parquet file; the file is ``<name>.parquet``."""
    target: TargetContract
    rows: int = Field(ge=0)
    opened_at: float
    closed_at: float
    dropped: dict[str, int]
    """Rows lost by a fault or for want of room, by reason."""
    excluded: dict[str, int]
    """Requests not captured because policy said so, by reason."""

    @property
    def file(self) -> str:
        """Name of the parquet file."""
        return f"{self.name}.parquet"


class WindowManifest(Record):
    """What one replica captured in one window: ``windows/<window>/<replica>/manifest.json``."""

    schema_version: Literal[1] = 1
    window: str
    replica: str
    target: TargetContract | None = None
    """None when nothing of the window could be used."""
    shards: tuple[str, ...] = ()
    """sha256 of each, sorted."""
    segments: tuple[str, ...] = ()
    """sha256 of the pieces that ``requests.parquet`` was merged from, sorted."""
    rows: int = 0
    requests: int = 0
    """Rows of the request table."""
    drafts: tuple[str, ...] = ()
    """Digests of the drafts that served."""
    engines: tuple[str, ...] = ()
    dropped: dict[str, int] = Field(default_factory=dict)
    excluded: dict[str, int] = Field(default_factory=dict)
    quarantined: dict[str, str] = Field(default_factory=dict)
    """Rule by file name."""


class HarvestResult(Record):
    """What one harvest brought in."""

    repository: str
    commit: str | None
    """Head of ``main`` after it; None when no window was closed."""
    windows: tuple[str, ...] = ()
    shards: int = 0
    rows: int = 0
    requests: int = 0
    size: int = 0
    """Bytes of new shards."""
    duplicates: int = 0
    """Shards that ``main`` had already, not stored again."""
    quarantined: dict[str, int] = Field(default_factory=dict)
    """Files refused, by rule."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Rows lost while capturing, by reason, as the manifests say."""
    excluded: dict[str, int] = Field(default_factory=dict)


class Snapshot(Record):
    """An immutable commit of states, and what it holds."""

    schema_version: Literal[1] = 1
    repository: str
    commit: str
    target: TargetContract
    windows: tuple[str, ...]
    shards: int
    requests: int
    rows: int
    drafts: tuple[str, ...]
