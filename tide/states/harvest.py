"""The harvest: every closed window of a spool becomes one commit of states, and only then leaves the spool.

Owns what becomes of a spool's files, and that a run is repeatable: after a crash between any two steps the next run
ends with the same content and no second commit (the way to main is window_branch's). Layout, for each replica:

    windows/<window>/<replica>/{train,held_out}/<sha256>.safetensors + .json
    windows/<window>/<replica>/requests.parquet
    windows/<window>/<replica>/manifest.json

Works over the Store port; knows nothing of lakeFS, Prefect or the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path, PurePosixPath

import torch

from tide import repositories
from tide.domain import Erasure, HarvestResult, TargetContract, WindowManifest
from tide.erasure.scan import Subjects
from tide.states import spool as spools
from tide.states import window_branch
from tide.states.intake import Intake
from tide.states.local_copies import clean_spool
from tide.states.requests import merge_segments, parse_table
from tide.states.spool import SpooledSegment, SpooledShard, SpoolWindow, sum_counts
from tide.states.window_branch import ROOT, TABLE, WindowBranch
from tide.store.base import Store


@dataclass(frozen=True)
class Harvester:
    """One replica's spool and where its windows go.

    Args:
        repository: states repository; made when missing.
        replica: name of the replica; one writer a replica.
        expected_target: the target that serves. None: the first shard of a window decides.
        head: [V, H] lm_head weight for the semantic check; None leaves it out.
        erased: erasures on the ledger: rows of theirs that this spool still holds from before are not brought back.
    """

    store: Store
    spool: Path
    repository: str
    replica: str
    window_s: int
    expected_target: TargetContract | None = None
    head: torch.Tensor | None = None
    erased: Sequence[Erasure] = ()

    def run(self, now: float) -> HarvestResult:
        """Harvest all windows that ended before ``now`` (seconds since the epoch), oldest first.

        Raises:
            SpoolBusy: another harvester works on this spool.
            ConfigError: there is no spool.
            Conflict: another harvests this window under the same replica's name; see `WindowBranch.publish`.
            StoreError: the store refused; the window's files stay in the spool, and earlier windows are done.
        """
        with spools.locked(self.spool):
            repositories.ensure(self.store, self.repository)
            refused = self._refuse_damaged(now)
            self._leave_out_erased()
            known = self._known_shards()
            results = [HarvestResult(repository=self.repository, commit=None, quarantined=refused)]
            for window, content in spools.closed_windows(self.spool, now, self.window_s).items():
                results.append(self._window(window, content, known))
            commit = self.store.head(self.repository, "main").id if len(results) > 1 else None
        return reduce(_add, results).model_copy(update={"commit": commit})

    def _window(self, window: str, content: SpoolWindow, known: set[str]) -> HarvestResult:
        old = window_branch.stored(self.store, self.repository, "main", window, self.replica)
        held = {*old.shards, *old.segments} if old else set()
        twice = [s for s in content.shards if s.manifest.name in known - held]
        intake = self._intake(old, window)
        shards = intake.shards([s for s in content.shards if s.manifest.name not in known | held])
        segments = intake.segments([s for s in content.segments if s.manifest.name not in held])
        table = self._table(window, old, segments)
        refused = spools.quarantined(self.spool, window)
        new = _manifest(old or WindowManifest(window=window, replica=self.replica), shards, segments, table, refused)
        branch = WindowBranch(self.store, self.repository, old, new)
        if new != old and (new.shards or new.segments or new.quarantined):
            branch.publish(*_content(shards, table))
        else:
            branch.drop()
        known.update(s.manifest.name for s in shards)
        for path in content.paths:
            if path.name not in intake.refused:
                spools.remove(path)
        return HarvestResult(
            repository=self.repository,
            commit=None,
            windows=(window,),
            shards=len(shards),
            rows=sum(s.manifest.rows for s in shards),
            requests=new.requests - (old.requests if old else 0),
            size=sum(s.manifest.size for s in shards),
            duplicates=len(twice),
            quarantined=dict(Counter(intake.refused.values())),
            dropped=sum_counts(s.manifest.dropped for s in segments),
            excluded=sum_counts(s.manifest.excluded for s in segments),
        )

    def _intake(self, old: WindowManifest | None, window: str) -> Intake:
        target = self.expected_target or (old.target if old else None)
        return Intake(self.spool, window, target, self.head)

    def _refuse_damaged(self, now: float) -> dict[str, int]:
        rules = spools.damaged(self.spool, now)
        for path, rule in rules.items():
            spools.quarantine(self.spool, path, window="", rule=rule, detail="it can never be read: see the file")
        return dict(Counter(rules.values()))

    def _leave_out_erased(self) -> None:
        """An erasure cleans the spool of its own host; this one may be another, or a harvest may have been at work."""
        for erasure in self.erased:
            subjects = Subjects(conversations=erasure.conversations, requests=erasure.requests)
            clean_spool(self.spool, subjects, dry_run=False, before=erasure.at)

    # What is stored

    def _known_shards(self) -> set[str]:
        paths = (PurePosixPath(o.path) for o in self.store.list(self.repository, "main", ROOT))
        return {path.stem for path in paths if path.suffix == ".safetensors"}

    def _table(self, window: str, old: WindowManifest | None, segments: Sequence[SpooledSegment]) -> bytes | None:
        paths = [s.path for s in segments]
        if not paths:
            return None
        if old is None or not old.segments:
            return merge_segments(paths)
        # Pieces that came late join the ones of this window that are stored already.
        (self.spool / spools.SCRATCH).mkdir(exist_ok=True)
        earlier = self.spool / spools.SCRATCH / f"{window}-{TABLE}"
        try:
            self.store.download(self.repository, "main", window_branch.prefix(window, self.replica) + TABLE, earlier)
            return merge_segments([*paths, earlier])
        finally:
            earlier.unlink(missing_ok=True)


def _content(shards: Sequence[SpooledShard], table: bytes | None) -> tuple[dict[str, Path], dict[str, bytes]]:
    """What comes in, by path inside the window: files, and what is in memory."""
    files, small = {}, {}
    for item in shards:
        path = PurePosixPath(item.manifest.split, item.manifest.file)
        files[str(path)] = item.path
        small[str(path.with_suffix(".json"))] = item.manifest.to_json().encode()
    if table is not None:
        small[TABLE] = table
    return files, small


def _manifest(
    before: WindowManifest,
    shards: Sequence[SpooledShard],
    segments: Sequence[SpooledSegment],
    table: bytes | None,
    refused: Mapping[str, str],
) -> WindowManifest:
    """The window's manifest after this run: what was there, and what comes in."""
    rows = parse_table(table, TABLE) if table is not None else None
    drafts = {r.draft for s in shards for r in s.manifest.requests} | set(rows["draft"].to_pylist() if rows else ())
    targets = [s.manifest.target for s in shards] + [s.manifest.target for s in segments]
    return before.model_copy(
        update={
            "target": before.target or next(iter(targets), None),
            "shards": tuple(sorted({*before.shards, *(s.manifest.name for s in shards)})),
            "segments": tuple(sorted({*before.segments, *(s.manifest.name for s in segments)})),
            "rows": before.rows + sum(s.manifest.rows for s in shards),
            "requests": rows.num_rows if rows else before.requests,
            "drafts": tuple(sorted({*before.drafts, *drafts})),
            "engines": tuple(sorted({*before.engines, *(s.manifest.engine for s in shards)} - {""})),
            "dropped": sum_counts([before.dropped, *(s.manifest.dropped for s in segments)]),
            "excluded": sum_counts([before.excluded, *(s.manifest.excluded for s in segments)]),
            "quarantined": dict(sorted({**before.quarantined, **refused}.items())),
        }
    )


def _add(left: HarvestResult, right: HarvestResult) -> HarvestResult:
    """Sum of two results of one repository."""
    counts = ("shards", "rows", "requests", "size", "duplicates")
    update: dict[str, object] = {name: getattr(left, name) + getattr(right, name) for name in counts}
    for name in ("quarantined", "dropped", "excluded"):
        update[name] = sum_counts([getattr(left, name), getattr(right, name)])
    return left.model_copy(update=update | {"windows": left.windows + right.windows})
