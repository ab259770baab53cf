"""The spool on disk: open shards of each split folder, the request table's open piece, the quota.

Owns when files are closed and what happens when the disk says no: rows are dropped and counted, nothing waits and
nothing half-written is left. Knows nothing of threads or of the engine. Layout:

    SPOOL/train/<sha256>.safetensors + .json       SPOOL/requests/<sha256>.parquet + .json
    SPOOL/held_out/<sha256>.safetensors + .json
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tide.domain import Split, TargetContract
from tide.sglang_plugin.counters import CaptureCounters
from tide.states.requests import write_segment
from tide.states.shards import RequestStates, write_shard

FOLDERS = ("train", "held_out", "requests")
_MAX_TABLE_ROWS = 50_000
_STALE_TEMPORARY_S = 3600.0


@dataclass
class _OpenShard:
    split: Split
    opened_at: float
    states: list[RequestStates] = field(default_factory=list)
    size: int = 0

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.states)


class Spool:
    """Open files of one writer.

    Args:
        root: the spool folder, existing.
        target: identity of the running target.
        engine: engine name and version, as recorded in shards.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        root: Path,
        *,
        target: TargetContract,
        engine: str,
        counters: CaptureCounters,
        shard_bytes: int,
        shard_age_s: float,
        quota_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._target, self._engine, self._counters = root, target, engine, counters
        self._shard_bytes, self._age, self._quota, self._clock = shard_bytes, shard_age_s, quota_bytes, clock
        self._open: dict[str, _OpenShard] = {}
        self._table: list[dict[str, Any]] = []
        self._table_opened = clock()
        remove_stale_temporaries(root, clock())

    @property
    def held(self) -> int:
        """Bytes of rows in open shards."""
        return sum(shard.size for shard in self._open.values())

    def put(self, states: RequestStates, split: Split) -> bool:
        """Add a finished request to the open shard of its folder.

        Args:
            states: rows in the target's dtype; they are stored as bfloat16.

        Returns:
            False when the rows are refused (not finite, wrong width): dropped and counted.
        """
        rule = _broken_rule(states, self._target.hidden_size)
        if rule is not None:
            self._counters.drop(rule, states.rows)
            return False
        aux, last = states.aux_hidden.to(torch.bfloat16), states.last_hidden.to(torch.bfloat16)
        shard = self._open.setdefault(split.folder, _OpenShard(split, self._clock()))
        shard.states.append(replace(states, aux_hidden=aux, last_hidden=last))
        shard.size += aux.nbytes + last.nbytes + states.input_ids.nbytes
        if shard.size >= self._shard_bytes:
            self._close(split.folder)
        return True

    def note(self, row: dict[str, Any]) -> None:
        """Add one row to the request table."""
        if len(self._table) >= _MAX_TABLE_ROWS:
            self._counters.drop("table_rows", 1)
            return
        self._table.append(row)

    def close_aged(self) -> None:
        """Close every shard, and the table's piece, that reached its age."""
        now = self._clock()
        for folder in [f for f, shard in self._open.items() if now - shard.opened_at >= self._age]:
            self._close(folder)
        if now - self._table_opened >= self._age:
            self._close_table()

    def close(self) -> None:
        """Close everything that is open."""
        for folder in list(self._open):
            self._close(folder)
        self._close_table()

    def used(self) -> int:
        """Bytes of all files in the spool; what harvest put into quarantine takes room as well."""
        return sum(_size(entry) for folder in (*FOLDERS, "quarantine") for entry in _entries(self._root / folder))

    def _close(self, folder: str) -> None:
        shard = self._open.pop(folder)
        if not self._has_room(shard.size):
            self._counters.drop("quota", shard.rows)
            return
        try:
            write_shard(
                self._root / folder,
                shard.states,
                split=shard.split,
                target=self._target,
                opened_at=shard.opened_at,
                closed_at=self._clock(),
                engine=self._engine,
            )
        except OSError as error:
            self._counters.drop(_reason(error), shard.rows)
            self._counters.warn_once(f"shard:{error.errno}", f"a shard could not be written: {error}")
            return
        self._counters.add("shards")
        self._counters.add("rows", shard.rows)

    def _has_room(self, size: int) -> bool:
        used = self.used()
        self._counters.gauge("spool_bytes", used)
        return used + size <= self._quota

    def _close_table(self) -> None:
        """Write the table's piece; rows and counters that could not be written stay for the next time."""
        now = self._clock()
        dropped, excluded = self._counters.period()
        if not (self._table or dropped or excluded):
            self._table_opened = now
            return
        try:
            write_segment(
                self._root / "requests",
                self._table,
                target=self._target,
                opened_at=self._table_opened,
                closed_at=now,
                dropped=dropped,
                excluded=excluded,
            )
        except OSError as error:
            self._counters.warn_once(f"table:{error.errno}", f"the request table could not be written: {error}")
            return
        self._counters.close_period(dropped, excluded)
        self._table, self._table_opened = [], now


def remove_stale_temporaries(root: Path, now: float) -> None:
    """Remove what a killed process left half-written. Young ones may belong to another rank that is writing."""
    for folder in FOLDERS:
        for entry in _entries(root / folder):
            path = Path(entry.path)
            if entry.name.startswith(".") and now - path.stat().st_mtime > _STALE_TEMPORARY_S:
                path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as listing:
        return [entry for entry in listing if entry.is_file()]


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # harvest removed it between listing and looking
        return 0


def _broken_rule(states: RequestStates, hidden: int) -> str | None:
    if states.aux_hidden.shape != (states.rows, 3 * hidden) or states.last_hidden.shape != (states.rows, hidden):
        return "wrong_width"
    if not (bool(torch.isfinite(states.aux_hidden).all()) and bool(torch.isfinite(states.last_hidden).all())):
        return "non_finite"
    return None


def _reason(error: OSError) -> str:
    return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk_error"
