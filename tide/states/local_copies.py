"""Copies of captured rows on this machine: the spool's files that are not harvested yet, and what downloads left.

Owns where such copies lie and how they are written again or removed. Knows nothing of stores.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from tide.domain import RequestSegment, Shard, Value
from tide.erasure.scan import Subjects
from tide.errors import BadInputError
from tide.states import requests
from tide.states import spool as spools
from tide.states.shard_checks import rewrite_shard

IDLE_S = 3600.0
"""A training folder that nothing was written to for so long is what a killed run left behind."""


class LocalCopies(Value):
    """What was found on this machine, and done about it."""

    spool: str | None
    """Folder of the spool; None: this machine has none."""
    requests: tuple[str, ...] = ()
    """Requests of the subjects in the spool, by their hashes."""
    rewritten: tuple[str, ...] = ()
    """Spooled files written again without them, or removed when nothing was left."""
    removed: tuple[str, ...] = ()
    """Copies that were removed."""
    unreadable: tuple[str, ...] = ()
    """Quarantined files that do not say whose rows they have."""
    busy: tuple[str, ...] = ()
    """Training folders that may hold copies and are in use."""


def clean_spool(spool: Path, subjects: Subjects, *, dry_run: bool, before: float = math.inf) -> LocalCopies:
    """Write spooled shards and pieces of the request table again without the subjects; the caller holds the lock.

    The new file is there before the old one goes: killed in between, both are found and the old one goes next time.

    Args:
        before: files opened at this time or later are left alone, seconds since the epoch.

    Raises:
        ShardError, BadInputError: a spooled file cannot be read; names it.
    """
    named: set[str] = set()
    rewritten: list[str] = []
    for path, manifest in _shards(spool):
        meant = {r.request for r in manifest.requests if subjects.name(r.request, r.conversation)}
        if meant and manifest.opened_at < before:
            named |= meant
            rewritten.append(str(path))
            if not dry_run:
                rewrite_shard(path, path.parent, lambda r: subjects.name(r.request, r.conversation))
                spools.remove(path)
    for path, segment in _segments(spool):
        if segment.opened_at >= before:
            continue
        rows = requests.read_table([path]).to_pylist()
        meant = {row["request"] for row in rows if subjects.name(row["request"], row["conversation"])}
        if meant:
            named |= meant
            rewritten.append(str(path))
            if not dry_run:
                _write_again(path.parent, segment, [row for row in rows if row["request"] not in meant])
                spools.remove(path)
    removed, unreadable = _clean_quarantine(spool, subjects, dry_run=dry_run)
    return LocalCopies(
        spool=str(spool),
        requests=tuple(sorted(named)),
        rewritten=tuple(rewritten),
        removed=tuple(removed),
        unreadable=tuple(unreadable),
    )


def _write_again(folder: Path, old: RequestSegment, rows: list[dict[str, object]]) -> None:
    requests.write_segment(
        folder,
        rows,
        target=old.target,
        opened_at=old.opened_at,
        closed_at=old.closed_at,
        dropped=old.dropped,
        excluded=old.excluded,
    )


def _shards(spool: Path) -> Iterator[tuple[Path, Shard]]:
    for folder in spools.SHARD_FOLDERS:
        for path in sorted((spool / folder).glob("[!.]*.json")):
            # A broken manifest goes to quarantine at the next harvest; it names no rows that anything could read.
            if (manifest := _parse_shard(path)) is not None and path.with_suffix(".safetensors").exists():
                yield path.with_suffix(".safetensors"), manifest


def _segments(spool: Path) -> Iterator[tuple[Path, RequestSegment]]:
    for path in sorted((spool / spools.REQUESTS).glob("[!.]*.json")):
        if path.with_suffix(".parquet").exists():
            try:
                yield path.with_suffix(".parquet"), requests.read_segment(path)
            except BadInputError as error:
                raise BadInputError(f"{error}; run the harvest, which quarantines it, and erase again") from error


def _parse_shard(path: Path) -> Shard | None:
    try:
        return Shard.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _clean_quarantine(spool: Path, subjects: Subjects, *, dry_run: bool) -> tuple[list[str], list[str]]:
    """Refused files of the subjects are removed, with their notes, which may name a request."""
    removed, unreadable = [], []
    for note in sorted((spool / spools.QUARANTINE).glob("*.reason.json")):
        stem = note.name.removesuffix(".reason.json")
        files = [f for f in note.parent.glob(f"{stem}.*") if f != note]
        verdict = _quarantined_holds(note.parent, stem, subjects)
        if verdict:
            removed += [str(f) for f in files]
            for file in (*files, note) if not dry_run else ():
                file.unlink(missing_ok=True)
        elif verdict is None and files:
            unreadable += [str(f) for f in files if f.suffix != ".json"]
    return removed, unreadable


def _quarantined_holds(folder: Path, stem: str, subjects: Subjects) -> bool | None:
    """Whether a refused file has rows of the subjects; None: it does not say."""
    if (folder / f"{stem}.parquet").exists():
        try:
            table = requests.read_table([folder / f"{stem}.parquet"])
        except BadInputError:
            return None
        rows = zip(table["request"].to_pylist(), table["conversation"].to_pylist(), strict=True)
        return any(subjects.name(*row) for row in rows)
    manifest = _parse_shard(folder / f"{stem}.json")
    return None if manifest is None else any(subjects.name(r.request, r.conversation) for r in manifest.requests)


def clean_downloads(home: Path, shards_gone: Iterable[str], tables_gone: Iterable[str], *, now: float) -> LocalCopies:
    """Remove downloads of touched shards and tables, and what training made of them.

    Args:
        home: TIDE_HOME; its ``cache`` and ``train`` are looked through.
        shards_gone: names (sha256) of shards.
        tables_gone: names of request tables as the cache has them.
        now: seconds since the epoch.
    """
    wanted = {f"{name}{suffix}" for name in shards_gone for suffix in (".safetensors", ".json")} | set(tables_gone)
    removed, busy = [], []
    for path in sorted((home / "cache").rglob("*")):
        if path.name in wanted:
            path.unlink()
            removed.append(str(path))
    # Training materialises its samples under names of its own: a run's folder goes whole.
    for folder in sorted(f for f in (home / "train").glob("*") if f.is_dir()):
        if now - _last_written(folder) < IDLE_S:
            busy.append(str(folder))
        else:
            shutil.rmtree(folder)
            removed.append(str(folder))
    return LocalCopies(spool=None, removed=tuple(removed), busy=tuple(busy))


def _last_written(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # a run at work; its folder is new enough by that
            return time.time()
    return max(times)
