"""Erasure: the rows of a conversation or a request are taken out of live states, and every old copy is deleted.

Owns the order, which makes a run repeatable: live states are written again and merged, what goes is put on the ledger,
then the bytes are deleted, then every place that had them is seen to answer Gone, then that is put on the ledger.
Killed between any two steps, the next run completes. Works over the Store port; knows nothing of lakeFS, and sees ids
only as the hashes that capture wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tide import repositories
from tide.domain import ErasedObject, Erasure, ErasureDone, Record
from tide.erasure.rewrite import discard_leftovers, rewrite
from tide.erasure.scan import Found, Subjects, scan
from tide.errors import Conflict, Gone, NotFound, StoreError
from tide.lineage import history, ledger
from tide.repositories import MAIN
from tide.states import spool
from tide.states.local_copies import LocalCopies, clean_downloads, clean_spool
from tide.states.window_branch import ROOT
from tide.store.base import Store

_ATTEMPTS = 5
"""How often main may move under a rewrite before we give up."""
_ORDER = {"shard": 0, "table": 1, "manifest": 2}


class ErasureResult(Record):
    """What an erasure found and did; with ``dry_run`` what it would do."""

    id: str
    dry_run: bool
    erasures: tuple[Erasure, ...]
    """On the ledger now; the last one is of this run, unless an earlier one was only completed."""
    live_objects: int
    """Objects of main that were written again."""
    spool: LocalCopies
    downloads: LocalCopies


@dataclass(frozen=True)
class Eraser:
    """Erases from one service.

    Args:
        states, drafts: its two repositories.
        spool_folder: of the replica on this machine; one that does not exist is left out.
        home: TIDE_HOME, where downloads lie.
        clock: seconds since the epoch.
    """

    store: Store
    states: str
    drafts: str
    spool_folder: Path
    home: Path
    clock: Callable[[], float] = time.time

    def run(self, subjects: Subjects, *, dry_run: bool = False) -> ErasureResult:
        """Erase, or say what would be erased.

        Raises:
            NotFound: no row of the subjects anywhere.
            ConfigError: bytes of the store cannot be deleted from here; nothing was changed.
            Conflict: a branch that is not merged holds such rows, or main did not stand still; says what to do.
            SpoolBusy: a harvest is at work on this machine.
        """
        self.store.require_erasable(self.states)
        if not self.spool_folder.is_dir():
            return self._all(subjects, LocalCopies(spool=None), dry_run)
        with spool.locked(self.spool_folder):  # held to the end: no harvest brings in what is being taken out
            spooled = clean_spool(self.spool_folder, subjects, dry_run=True)
            return self._all(subjects, spooled, dry_run)

    def _all(self, subjects: Subjects, spooled: LocalCopies, dry_run: bool) -> ErasureResult:
        if not dry_run:
            discard_leftovers(self.store, self.states)
        found = scan(self.store, self.states, subjects)
        self._refuse_unmerged(found)
        waiting, known = self._records(subjects)
        planned = [] if self._is_planned(found, spooled, waiting) else [self._record(subjects, found, spooled)]
        result = ErasureResult(
            id=subjects.id,
            dry_run=dry_run,
            erasures=(*known, *planned),
            live_objects=len(found.live),
            spool=spooled,
            downloads=LocalCopies(spool=None),
        )
        if not result.erasures:
            raise NotFound(
                f"no row of these ids in {self.states} or the spool {self.spool_folder}: check the id, and that the "
                "hash key is the one of the replicas (TIDE_HASH_KEY); requests that asked for no_logs leave none"
            )
        if dry_run:
            return result
        found = self._clear_main(subjects, found)
        if planned:  # main has moved since: its older commits are named as well
            planned = [self._record(subjects, found, spooled)]
            ledger.append(self.store, self.drafts, ledger.ERASURE, planned[0], at=planned[0].at)
        for erasure in (*waiting, *planned):
            self._delete(erasure)
        if spooled.spool:
            spooled = clean_spool(self.spool_folder, subjects, dry_run=False)
        erasures = (*known, *planned)
        return result.model_copy(
            update={"erasures": erasures, "spool": spooled, "downloads": self._clean_downloads(erasures)}
        )

    def _refuse_unmerged(self, found: Found) -> None:
        if found.unmerged:
            raise Conflict(
                f"{self.states}: branch {', '.join(found.unmerged)} holds such rows and is not merged: run the "
                "harvest, which merges its own, or delete the branch; then erase again"
            )

    def _clear_main(self, subjects: Subjects, found: Found) -> Found:
        """Write live states again until main has no such row, whoever else merges meanwhile."""
        for _ in range(_ATTEMPTS):
            if not found.live:
                return found
            try:
                rewrite(self.store, self.states, subjects, found.live)
            except Conflict:
                discard_leftovers(self.store, self.states)
            found = scan(self.store, self.states, subjects)
            self._refuse_unmerged(found)
        if found.live:
            raise Conflict(f"{self.states}: {MAIN} changed under {_ATTEMPTS} tries: stop the harvest and erase again")
        return found

    # The ledger

    def _records(self, subjects: Subjects) -> tuple[list[Erasure], list[Erasure]]:
        """Erasures of this set that are on the ledger and not done, and all of this set; oldest first."""
        done = {r.erasure for r in ledger.every(self.store, self.drafts, ledger.ERASED, ErasureDone)}
        known = [r for r in ledger.every(self.store, self.drafts, ledger.ERASURE, Erasure) if r.id == subjects.id]
        return [r for r in known if r.digest() not in done], known

    @staticmethod
    def _is_planned(found: Found, spooled: LocalCopies, waiting: Sequence[Erasure]) -> bool:
        """True when there is nothing to erase that an erasure on the ledger does not name already."""
        named = {o.address for erasure in waiting for o in erasure.objects}
        every = {o.address for holding in found.holdings for o in holding.objects}
        return every <= named and not (spooled.rewritten or spooled.removed)

    def _record(self, subjects: Subjects, found: Found, spooled: LocalCopies) -> Erasure:
        shards = [h for h in found.holdings if h.rows]
        objects = {o.address: o for h in found.holdings for o in h.objects}
        return Erasure(
            id=subjects.id,
            repository=self.states,
            conversations=tuple(sorted(subjects.conversations)),
            requests=tuple(sorted(subjects.requests)),
            objects=tuple(sorted(objects.values(), key=lambda o: (o.path, o.commit))),
            commits=found.commits,
            drafts=tuple(self._drafts(found.commits)),
            erased_requests=len({r for h in found.holdings for r in h.requests} | set(spooled.requests)),
            other_requests=len({request for h in shards for request in h.others}),
            rows=sum({h.objects[0].digest: h.rows for h in shards}.values()),
            at=self.clock(),
        )

    def _drafts(self, commits: Iterable[str]) -> list[str]:
        """Drafts trained from one of these states commits, promoted or not."""
        wanted = {f"{self.states}@{commit}" for commit in commits}
        try:
            branches = [MAIN, *repositories.candidate_branches(self.store, self.drafts)]
        except NotFound:
            return []
        log = history.events(commit for branch in branches for commit in self.store.log(self.drafts, branch))
        trained = [e.record for e in log if e.record.kind == "candidate"]
        return sorted(r.subject for r in trained if r.parents.get("states") in wanted)

    # The bytes

    def _delete(self, erasure: Erasure) -> None:
        """Delete the bytes, see that they are gone wherever they were, and say so on the ledger."""
        for item in sorted(erasure.objects, key=lambda o: _ORDER[o.kind]):
            self.store.erase_bytes(erasure.repository, item.address)
        self._verify(erasure.repository, erasure.objects)
        done = ErasureDone(erasure=erasure.digest(), id=erasure.id, objects=len(erasure.objects), at=self.clock())
        ledger.append(self.store, self.drafts, ledger.ERASED, done, at=done.at)

    def _verify(self, repository: str, objects: Sequence[ErasedObject]) -> None:
        for item in objects:
            try:
                with self.store.open(repository, item.commit, item.path):
                    pass
            except Gone:
                continue
            raise StoreError(
                f"{repository}@{item.commit[:12]}:{item.path} is still served after its bytes at {item.address} were "
                "deleted: TIDE_LAKEFS_BLOCKS or TIDE_S3_ENDPOINT names another store than lakeFS uses"
            )

    def _clean_downloads(self, erasures: Sequence[Erasure]) -> LocalCopies:
        paths = [o.path for erasure in erasures for o in erasure.objects]
        tables = [p.removeprefix(ROOT).replace("/", "-") for p in paths if p.endswith(".parquet")]
        shards = [Path(p).stem for p in paths if not p.endswith(".parquet")]
        return clean_downloads(self.home, shards, tables, now=self.clock())
