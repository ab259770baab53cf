"""What a candidate has served, as the spool of this host has it: counters by request, and the shards with its states.

Owns which requests of the table speak for the candidate, and that a file which the harvest takes is still there for us.
Knows nothing of engines or drafts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from tide.domain import PROBE_SLICE, RequestSegment, Shard
from tide.errors import BadInputError
from tide.states import requests
from tide.states.spool import REQUESTS, SHARD_FOLDERS

M = TypeVar("M", RequestSegment, Shard)


@dataclass(frozen=True)
class Served:
    """A request that the candidate served from its first token to its last."""

    request: str
    rate: float
    """Accepted over proposed draft tokens, by the engine's counters."""
    temperature: float
    """0: decoded greedily."""


class SpoolView:
    """A spool, looked at again and again.

    Requests whose prompt came mostly from the prefix cache are left out: the draft's part of that cache is of the draft
    that served before, and the shard lacks their rows. Context manager: its links are gone on exit.

    Args:
        scratch: folder for the links, on the spool's file system if possible.
        draft: digest of the candidate.
        since: requests that arrived earlier are not its own, seconds since the epoch.
    """

    def __init__(self, spool: Path, scratch: Path, draft: str, since: float) -> None:
        self._spool, self._scratch, self._draft, self._since = spool, scratch, draft, since
        self._seen: set[Path] = set()
        self._served: dict[str, Served] = {}
        self._cached: set[str] = set()
        self._shards: dict[str, Path] = {}
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        shutil.rmtree(self._scratch, ignore_errors=True)  # what a killed watch left
        self._scratch.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def rates(self) -> list[float]:
        """Live rates of all its requests so far, those from the prefix cache too, in the order they were seen."""
        return [served.rate for served in self._served.values()]

    def look(self) -> None:
        """Take in what was closed since the last look."""
        for manifest, _ in self._new(REQUESTS, RequestSegment):
            path = manifest.with_suffix(".parquet")
            with contextlib.suppress(BadInputError):  # taken by the harvest between two looks, or broken: not ours
                for row in requests.read_table([path]).to_pylist():
                    self._take_row(row)
        for folder in SHARD_FOLDERS:
            for manifest, shard in self._new(folder, Shard):
                self._take_shard(manifest, shard)

    def take_walkable(self, most: int) -> list[tuple[Path, Served]]:
        """Requests with counters and states that were not given before, in the order they were served."""
        names = [n for n in self._served if n in self._shards and n not in self._taken and n not in self._cached][:most]
        self._taken.update(names)
        return [(self._shards[name], self._served[name]) for name in names]

    def _new(self, folder: str, kind: type[M]) -> Iterator[tuple[Path, M]]:
        """Manifests, which are written last, that were not looked at before; none of files closed before ``since``."""
        for path in sorted((self._spool / folder).glob("[!.]*.json")):
            if path in self._seen:
                continue
            self._seen.add(path)
            with contextlib.suppress(OSError, ValidationError):  # taken by the harvest, or broken: it sees to that
                manifest = kind.model_validate_json(path.read_bytes())
                if manifest.closed_at >= self._since:
                    yield path, manifest

    def _take_row(self, row: dict[str, Any]) -> None:
        measured = row["proposed"] and row["accepted"] is not None
        if (
            not measured
            or row["draft"] != self._draft
            or row["started_at"] < self._since
            or row["slice"] == PROBE_SLICE
        ):
            return
        if row["sampling"] == "unknown":
            return
        temperature = float(row["temperature"] or 0.0) if row["sampling"] == "sampled" else 0.0
        self._served[row["request"]] = Served(row["request"], row["accepted"] / row["proposed"], temperature)
        if 2 * row["cached_tokens"] > row["prompt_tokens"]:
            self._cached.add(row["request"])

    def _take_shard(self, manifest: Path, shard: Shard) -> None:
        linked = self._scratch / manifest.name
        try:
            _link(manifest.with_suffix(".safetensors"), linked.with_suffix(".safetensors"))
            _link(manifest, linked)
        except OSError:  # taken by the harvest between two looks
            return
        for request in shard.requests:
            if request.draft == self._draft:
                self._shards[request.request] = linked.with_suffix(".safetensors")


def _link(source: Path, destination: Path) -> None:
    """A second name for a file, so that it outlives its removal; a copy on another file system."""
    try:
        os.link(source, destination)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, destination)
