"""The spool: the folder between the serving engine, which fills it, and the harvest, which empties it.

    SPOOL/train/<sha256>.safetensors + .json        shards of training conversations
    SPOOL/held_out/<sha256>.safetensors + .json     shards of gate and selection conversations
    SPOOL/requests/<sha256>.parquet + .json         pieces of the request table
    SPOOL/quarantine/<file> + <name>.reason.json    what was refused, and why
    SPOOL/tmp/                                      scratch of the harvest
    SPOOL/harvest.lock                              held while one harvester works

Owns this layout, which window a file belongs to, and moving and removing files so that a crash loses none. A file
without a readable manifest is not listed. Knows nothing of stores, and does not judge what is inside a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tide.domain import Record, RequestSegment, Shard
from tide.errors import ConfigError, SpoolBusy
from tide.files import sync_folder, write_durably

R = TypeVar("R", bound=Record)

SHARD_FOLDERS = ("train", "held_out")
REQUESTS = "requests"
QUARANTINE = "quarantine"
SCRATCH = "tmp"
ORPHAN_S = 3600.0
"""A data file that has had no manifest for so long is what a killed writer left behind."""


@dataclass(frozen=True)
class SpooledShard:
    """A shard in the spool, as its manifest describes it; the file may be missing or broken."""

    path: Path
    manifest: Shard


@dataclass(frozen=True)
class SpooledSegment:
    """A piece of the request table in the spool."""

    path: Path
    manifest: RequestSegment


@dataclass(frozen=True)
class SpoolWindow:
    """What was closed in one window."""

    shards: list[SpooledShard] = field(default_factory=list)
    segments: list[SpooledSegment] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        """All data files; each has its manifest beside it, with the suffix ``.json``."""
        return [shard.path for shard in self.shards] + [segment.path for segment in self.segments]


class QuarantineNote(Record):
    """Why a file was refused; kept beside it."""

    file: str
    folder: str
    """Folder of the spool that it came from."""
    window: str
    """Empty when the manifest could not be read."""
    rule: str
    detail: str


def window_of(closed_at: float, window_s: int) -> str:
    """Name of the window that a moment falls into: its start in UTC, ``20261130T042000Z``.

    Args:
        closed_at: seconds since the epoch.
        window_s: length of windows, which start at multiples of it since the epoch.
    """
    start = int(closed_at // window_s) * window_s
    return datetime.fromtimestamp(start, UTC).strftime("%Y%m%dT%H%M%SZ")


def closed_windows(spool: Path, now: float, window_s: int) -> dict[str, SpoolWindow]:
    """Everything in the spool whose window has ended, oldest window first.

    A file that appears after its window was harvested is listed again under that window.

    Raises:
        ConfigError: there is no spool folder.
    """
    if not spool.is_dir():
        raise ConfigError(f"spool {spool} does not exist: point TIDE_SPOOL at the TIDE_SPOOL_DIR of the serving engine")
    found: dict[str, SpoolWindow] = defaultdict(SpoolWindow)
    for folder in SHARD_FOLDERS:
        for path in _manifests(spool / folder):
            if (shard := _parse(path, Shard)) and _closed(shard.closed_at, now, window_s):
                spooled = SpooledShard(path.with_suffix(".safetensors"), shard)
                found[window_of(shard.closed_at, window_s)].shards.append(spooled)
    for path in _manifests(spool / REQUESTS):
        if (segment := _parse(path, RequestSegment)) and _closed(segment.closed_at, now, window_s):
            piece = SpooledSegment(path.with_suffix(".parquet"), segment)
            found[window_of(segment.closed_at, window_s)].segments.append(piece)
    return dict(sorted(found.items()))


def damaged(spool: Path, now: float) -> dict[Path, str]:
    """Data files that never become readable, with the rule they break: a malformed manifest, or none for an hour."""
    found: dict[Path, str] = {}
    for folder in (*SHARD_FOLDERS, REQUESTS):
        suffix, kind = (".parquet", RequestSegment) if folder == REQUESTS else (".safetensors", Shard)
        for path in _manifests(spool / folder):
            if path.exists() and _parse(path, kind) is None:
                found[path.with_suffix(suffix)] = "bad_manifest"
        for path in sorted((spool / folder).glob(f"[!.]*{suffix}")):
            if not path.with_suffix(".json").exists() and now - _modified(path, now) > ORPHAN_S:
                found[path] = "no_manifest"
    return found


def quarantine(spool: Path, path: Path, *, window: str, rule: str, detail: str) -> QuarantineNote:
    """Move a data file and its manifest out of the way, with a note that says why.

    The note is written first and the manifest moved last, so that after a crash in between the file is found again
    and the move is completed under its first reason.
    """
    refused, manifest = spool / QUARANTINE, path.with_suffix(".json")
    refused.mkdir(exist_ok=True)
    note_path = refused / f"{path.stem}.reason.json"
    note = QuarantineNote(file=path.name, folder=path.parent.name, window=window, rule=rule, detail=detail)
    if note_path.exists() and not path.exists():
        note = QuarantineNote.model_validate_json(note_path.read_bytes())
    else:
        write_durably(note_path, note.to_json().encode())
    for source in (path, manifest):
        with contextlib.suppress(FileNotFoundError):
            source.replace(refused / source.name)
    sync_folder(refused)
    sync_folder(path.parent)
    return note


def quarantined(spool: Path, window: str) -> dict[str, str]:
    """Rule by file name of what was refused in one window."""
    refused = spool / QUARANTINE
    found = {}
    for path in refused.glob("*.reason.json"):
        note = QuarantineNote.model_validate_json(path.read_bytes())
        # A file that someone put back into the spool has left its note behind.
        there = any((refused / name).exists() for name in (Path(note.file).name, f"{Path(note.file).stem}.json"))
        if note.window == window and there:
            found[note.file] = note.rule
    return found


def remove(path: Path) -> None:
    """Remove a data file and then its manifest: what a crash leaves in between is still listed, and removed again."""
    for part in (path, path.with_suffix(".json")):
        part.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def locked(spool: Path) -> Iterator[None]:
    """Hold the spool for one harvester; the lock ends with the process, however it ends.

    Raises:
        SpoolBusy: another harvester holds it.
        ConfigError: there is no spool folder.
    """
    if not spool.is_dir():
        raise ConfigError(f"spool {spool} does not exist: point TIDE_SPOOL at the TIDE_SPOOL_DIR of the serving engine")
    with (spool / "harvest.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise SpoolBusy(f"spool {spool} is being harvested by process {holder}: wait until it has ended") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of counters by reason, in the order of the reasons; what is zero is left out."""
    total: Counter[str] = Counter()
    for more in counts:
        total.update(more)
    return {reason: number for reason, number in sorted(total.items()) if number}


def _manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*.json"))


def _parse(path: Path, kind: type[R]) -> R | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _closed(closed_at: float, now: float, window_s: int) -> bool:
    return (closed_at // window_s + 1) * window_s <= now


def _modified(path: Path, now: float) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return now
