"""A running service seen from outside: what serves, what each replica serves, what lies in the spool. Reads only.

Owns these three views, shared by the status screen and the metrics. Works over the ports. Decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tide.domain import Promotion, Value
from tide.engine.base import Engine
from tide.engine.live import Live, LiveFigures
from tide.errors import BadInputError, ConfigError, StoreError, TideError
from tide.serving.serving_file import read_promotion, read_serving
from tide.states.spool import QUARANTINE, REQUESTS, SHARD_FOLDERS
from tide.store.base import Store

NO_DRAFT = "none"


class ServingView(Value):
    """What ``serving.json`` says."""

    generation: int
    draft: str
    """Digest of the stable draft, or ``none``."""
    previous: str | None = None
    change: Promotion | None = None
    """How this generation came about; None before the first, or when its record cannot be read."""
    canary: dict[str, Any] | None = None
    """The lease of a rollout that is under way."""

    @property
    def since(self) -> float | None:
        """When this generation began, seconds since the epoch."""
        return self.change.at if self.change else None


class ReplicaView(Value):
    """What one replica serves, and its figures at this moment."""

    name: str
    reachable: bool
    draft: str | None = None
    """Digest of its active draft, or ``none``; None when it did not answer."""
    detail: str = ""
    """Why it could not be reached, or why its figures are missing."""
    live: LiveFigures | None = None

    def matches(self, serving: ServingView | None) -> bool | None:
        """Whether it serves what ``serving.json`` says, a canary's replica its draft; None when either is not known."""
        if serving is None or self.draft is None:
            return None
        canary = serving.canary or {}
        on_trial = self.name in canary.get("replicas", ()) and self.draft == canary.get("draft")
        return on_trial or self.draft == serving.draft


class Backlog(Value):
    """What the spool holds that no harvest has taken."""

    files: int = 0
    """Data files: shards and pieces of the request table."""
    size: int = 0
    """Bytes, manifests included."""
    closed_files: int = 0
    """Of windows that have ended: what the next harvest takes."""
    oldest_closed_s: float | None = None
    """Seconds since the oldest such window ended; None when there is none."""
    quarantined: int = 0
    """Files that were refused and wait for a person."""


def serving_view(store: Store, repository: str) -> ServingView:
    """What serves by the one truth. Raises StoreError, BadInputError."""
    found = read_serving(store, repository)
    change = None
    if found.stable is not None:
        with suppress(StoreError, BadInputError):
            change = read_promotion(store, repository, found.generation)
    return ServingView(
        generation=found.generation,
        draft=found.stable.digest if found.stable else NO_DRAFT,
        previous=found.previous.digest if found.previous else None,
        change=change,
        canary=found.model_dump(mode="json")["canary"],
    )


def replica_views(replicas: Sequence[Engine], live: Live) -> list[ReplicaView]:
    """Every replica, asked side by side; one that does not answer is among them with the reason."""
    if not replicas:
        return []
    with ThreadPoolExecutor(min(len(replicas), 16), thread_name_prefix="replicas") as pool:
        return list(pool.map(lambda replica: _replica(replica, live), replicas))


def _replica(replica: Engine, live: Live) -> ReplicaView:
    """The scheduler itself answers which draft is active: a web server without one cannot."""
    try:
        draft = replica.active_draft()
    except TideError as error:
        return ReplicaView(name=replica.name, reachable=False, detail=str(error))
    try:
        figures = live[replica.name]() if replica.name in live else None
    except TideError as error:
        return ReplicaView(name=replica.name, reachable=True, draft=draft, detail=str(error))
    return ReplicaView(name=replica.name, reachable=True, draft=draft, live=figures)


def backlog(spool: Path, now: float, window_s: int) -> Backlog:
    """What lies in a spool, by names and sizes alone: no file is opened, however many there are.

    A file belongs to the window in which its manifest was written, which is when it was closed.

    Args:
        now: seconds since the epoch.
        window_s: length of windows, which start at multiples of it since the epoch.

    Raises:
        ConfigError: there is no spool folder.
    """
    if not spool.is_dir():
        raise ConfigError(f"spool {spool} does not exist: point TIDE_SPOOL at the TIDE_SPOOL_DIR of the serving engine")
    files, size, closed = 0, 0, list[float]()
    for entry in _entries(spool, (*SHARD_FOLDERS, REQUESTS)):
        size += entry.size
        if entry.name.endswith(".json"):
            files += 1
            ended = (entry.written // window_s + 1) * window_s
            closed += [ended] if ended <= now else []
    refused = sum(1 for entry in _entries(spool, (QUARANTINE,)) if entry.name.endswith(".reason.json"))
    return Backlog(
        files=files,
        size=size,
        closed_files=len(closed),
        oldest_closed_s=now - min(closed) if closed else None,
        quarantined=refused,
    )


class _File(NamedTuple):
    name: str
    size: int
    written: float


def _entries(spool: Path, folders: Sequence[str]) -> Iterator[_File]:
    for folder in folders:
        if not (spool / folder).is_dir():
            continue
        with os.scandir(spool / folder) as found:
            for entry in found:
                try:
                    if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                        facts = entry.stat(follow_symlinks=False)
                        yield _File(entry.name, facts.st_size, facts.st_mtime)
                except FileNotFoundError:  # harvested meanwhile
                    continue
