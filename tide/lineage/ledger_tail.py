"""The ledger as it grows: what was read once is not read again, and one look does bounded work.

Owns which records are counted, and what each counts as. Works over the Store port. Knows nothing of metrics or screens.
A look costs one call while nothing was written; else a listing of the days since the last look and the new records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from tide.domain import DriftReport, Promotion, Record, Value, Verdict
from tide.errors import NotFound
from tide.lineage.ledger import BRANCH, ROOT
from tide.store.base import Store

KINDS: Mapping[str, type[Record]] = {
    "drift": DriftReport,
    "verdict": Verdict,
    "promotion": Promotion,
    "rollback": Promotion,
}
"""Kinds whose content is read; of every other one the name is enough."""
READS = 500
"""Records that one look reads at most; a ledger of years is caught up over several."""
_READERS = 8
_OVERLAP = timedelta(days=1)
"""How far another host's clock may be behind: records that name an earlier time than the newest seen."""


class Entry(Value):
    """One record of the ledger, by its name."""

    path: str
    kind: str
    at: float
    """When it was written, seconds since the epoch."""


def entries(store: Store, repository: str, ref: str = BRANCH, days: Iterable[str] = ("",)) -> list[Entry]:
    """Records by their names, oldest first; attachments and what has no such name are left out.

    Args:
        days: of which days, as ``20261130``; the empty one is all of them.

    Raises:
        NotFound: there is no ledger yet.
    """
    paths = {item.path for day in days for item in store.list(repository, ref, f"{ROOT}{day}")}
    found = (_entry(path) for path in paths)
    return sorted((entry for entry in found if entry), key=lambda entry: entry.path)


def newest(store: Store, repository: str, *kinds: str) -> dict[str, tuple[Entry, Record]]:
    """The newest record of each kind (of `KINDS`); one without records is left out, as all are without a ledger.

    Looks through today, this month, this year and only then the rest, so that years of records cost nothing while a
    service works.

    Raises:
        ValidationError: a record is of a later version of TIDE.
    """
    last: dict[str, Entry] = {}
    for span in ("%Y%m%d", "%Y%m", "%Y", ""):
        try:
            found = entries(store, repository, days=(datetime.now(UTC).strftime(span),))
        except NotFound:
            return {}
        last |= {entry.kind: entry for entry in found}
        if set(kinds) <= last.keys():
            break
    wanted = [last[kind] for kind in kinds if kind in last]
    return {e.kind: (e, KINDS[e.kind].model_validate_json(store.read(repository, BRANCH, e.path))) for e in wanted}


def counted_as(record: Record) -> str:
    """What a record counts as; empty when it is not counted.

    A retrain for drift is written twice in one cycle, before and after the question whether the engine is at fault: it
    counts by the second, which alone has the figures of that check.
    """
    if isinstance(record, DriftReport):
        first_word = (record.decision, record.cause) == ("retrain", "drift") and "engine_requests" not in record.figures
        return "" if first_word else record.decision
    return record.outcome if isinstance(record, Verdict) else "done"


class LedgerTail:
    """Counts and newest records of one ledger, kept up to date by ``look``. Not thread-safe."""

    def __init__(self, store: Store, repository: str, *, reads: int = READS) -> None:
        self._store, self._repository, self._reads = store, repository, reads
        self._head, self._seen = "", set[str]()
        self._unread: list[Entry] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        """Records by kind and what they count as (`counted_as`); ``("*", kind)`` counts every record of a kind."""
        self.newest: dict[str, tuple[Entry, Record]] = {}
        self.unreadable = 0
        """Records of another version of TIDE."""

    @property
    def head(self) -> str:
        """The commit that was looked at last; it changes with every record."""
        return self._head

    @property
    def complete(self) -> bool:
        """True when all was read that was there at the last look."""
        return bool(self._head) and not self._unread

    @property
    def unread(self) -> int:
        """Records that are known and not read yet."""
        return len(self._unread)

    def look(self) -> None:
        """Take in what is new, at most so many records. Raises StoreError; what was taken in by then counts."""
        try:
            head = self._store.head(self._repository, BRANCH).id
        except NotFound:
            self._head = "none"
            return
        if head != self._head:
            found = entries(self._store, self._repository, head, self._days())
            self._unread += [entry for entry in found if entry.path not in self._seen]
            self._seen |= {entry.path for entry in found}
            self._head = head
            self._forget()
        batch = self._unread[: self._reads]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ledger") as pool:
            for entry, record in zip(batch, pool.map(lambda e: self._read(head, e), batch), strict=True):
                self._take(entry, record)
                self._unread.remove(entry)

    def _days(self) -> tuple[str, ...]:
        """Days on which there may be records not seen yet: all at the first look."""
        if not self._seen:
            return ("",)
        begin = _moment(max(self._seen)) - _OVERLAP
        span = (datetime.now(UTC) + _OVERLAP).date() - begin.date()
        return tuple(f"{begin.date() + timedelta(days=n):%Y%m%d}" for n in range(max(span.days, 0) + 1))

    def _forget(self) -> None:
        """Names of days that are never listed again need not be remembered."""
        if self._seen:
            oldest = f"{ROOT}{_moment(max(self._seen)) - _OVERLAP:%Y%m%d}"
            self._seen = {path for path in self._seen if path >= oldest}

    def _read(self, ref: str, entry: Entry) -> Record | None:
        if entry.kind not in KINDS:
            return None
        try:
            return KINDS[entry.kind].model_validate_json(self._store.read(self._repository, ref, entry.path))
        except ValidationError:
            self.unreadable += 1
            return None

    def _take(self, entry: Entry, record: Record | None) -> None:
        self.counts["*", entry.kind] += 1
        if record is None:
            return
        if what := counted_as(record):
            self.counts[entry.kind, what] += 1
        if entry.kind not in self.newest or entry.path > self.newest[entry.kind][0].path:
            self.newest[entry.kind] = (entry, record)


def _entry(path: str) -> Entry | None:
    """``ledger/<stamp>-<kind>-<8 hex>.json``; an attachment has one more suffix."""
    stem = path.removeprefix(ROOT).removesuffix(".json")
    rest = stem.partition("-")[2]
    kind = rest.rpartition("-")[0]
    if not path.endswith(".json") or "." in stem or not kind:
        return None
    try:
        return Entry(path=path, kind=kind, at=_moment(path).timestamp())
    except ValueError:
        return None


def _moment(path: str) -> datetime:
    stamp = path.removeprefix(ROOT).partition("-")[0]
    return datetime.strptime(stamp, "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC)
