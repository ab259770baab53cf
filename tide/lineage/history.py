"""What served when and why, and where a draft comes from: views of lineage records, as commits carry them.

Pure: values in, values out. Knows nothing of stores; `events` takes what a store's log gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tide.domain import LineageRecord, Record
from tide.errors import NotFound

_CHANGES = ("promotion", "rollback")


class Logged(Protocol):
    """A commit, as far as it matters here (tide.store.base.Commit)."""

    @property
    def id(self) -> str:
        """Commit id."""

    @property
    def created_at(self) -> float:
        """Seconds since the epoch."""

    @property
    def parents(self) -> tuple[str, ...]:
        """Commit ids."""

    @property
    def metadata(self) -> dict[str, str]:
        """As committed."""


class Event(Record):
    """A commit that carries a lineage record."""

    commit: str
    at: float
    """Seconds since the epoch."""
    record: LineageRecord


class Served(Record):
    """One generation of ``serving.json``."""

    generation: int
    kind: str
    draft: str
    previous: str | None
    at: float
    commit: str
    replicas: tuple[str, ...]
    verdict: str | None
    verdict_facts: dict[str, str]
    """What the gate found; empty when its record is not in the log."""


class Origin(Record):
    """A draft, what it was made from, and what was decided about it."""

    draft: str
    at: float | None
    """None: no candidate record in the log (imported, or older than the log)."""
    facts: dict[str, str]
    states: str | None
    """``repository@commit``."""
    windows: tuple[str, ...]
    """Harvest windows in that commit, oldest first."""
    verdicts: tuple[Event, ...]
    generations: tuple[int, ...]
    parent: Origin | None
    erasures: tuple[str, ...] = ()
    """Erasures that took rows out of that commit: the draft cannot be made again from it."""


def events(commits: Iterable[Logged]) -> list[Event]:
    """Lineage records of a log, newest first. A commit and the merge that repeats its record count once, the latter."""
    found: dict[str, Event] = {}
    for commit in commits:
        record = LineageRecord.from_metadata(commit.metadata)
        if record is not None:
            key = f"{record.kind}:{record.subject}:{record.facts.get('generation', '')}"
            found.setdefault(key, Event(commit=commit.id, at=commit.created_at, record=record))
    return list(found.values())


def served(log: Sequence[Event]) -> list[Served]:
    """Every generation, oldest first."""
    verdicts = {e.record.subject: e.record.facts for e in log if e.record.kind == "verdict"}
    return sorted(
        (_generation(e, verdicts) for e in log if e.record.kind in _CHANGES), key=lambda change: change.generation
    )


def _generation(event: Event, verdicts: Mapping[str, dict[str, str]]) -> Served:
    record = event.record
    verdict = record.parents.get("verdict")
    return Served(
        generation=int(record.facts["generation"]),
        kind=record.kind,
        draft=record.subject,
        previous=record.parents.get("previous"),
        at=event.at,
        commit=event.commit,
        replicas=tuple(filter(None, record.facts.get("replicas", "").split(","))),
        verdict=verdict,
        verdict_facts=verdicts.get(verdict or "", {}),
    )


def serving_at(changes: Sequence[Served], at: float) -> Served:
    """The generation that served at a time, seconds since the epoch.

    Raises:
        NotFound: nothing had been promoted by then.
    """
    before = [change for change in changes if change.at <= at]
    if not before:
        raise NotFound("no draft had been promoted by then; `tide history` lists every generation")
    return before[-1]


def find(name: str, log: Sequence[Event]) -> str:
    """Digest of the draft that a name means: ``serving``, a generation (``gen-3``), a digest or its beginning.

    Raises:
        NotFound: no such draft, or more than one; lists what there is.
    """
    changes = served(log)
    known = list(dict.fromkeys([*(c.draft for c in changes), *(_candidates(log))]))
    if name == "serving" and changes:
        return changes[-1].draft
    by_generation = {f"gen-{c.generation}": c.draft for c in changes}
    matching = [by_generation[name]] if name in by_generation else [d for d in known if d.startswith(name)]
    if len(matching) != 1:
        what = "no draft" if not matching else f"{len(matching)} drafts"
        listed = ", ".join(d[:12] for d in known[-8:]) or "none yet"
        raise NotFound(f"{what} named {name!r}; known: {listed} (or: serving, gen-N)")
    return matching[0]


def states_of(digest: str, log: Sequence[Event]) -> list[str]:
    """``repository@commit`` of the states that a draft and its parents were trained on, newest draft first."""
    made = _candidates(log)
    found = (made[draft].record.parents.get("states") for draft in _chain(digest, made) if draft in made)
    return [states for states in found if states]


def origin(
    digest: str,
    log: Sequence[Event],
    windows: Mapping[str, Sequence[str]],
    erasures: Mapping[str, Sequence[str]] | None = None,
) -> Origin:
    """A draft's tree back to harvest windows.

    Args:
        log: of the drafts repository; candidates that were never promoted need their branch's log in it.
        windows: harvest windows by states commit, see `windows_of`.
        erasures: ids of erasures by states commit.
    """
    made, verdicts, generations = _candidates(log), _verdicts(log), served(log)
    chain = _chain(digest, made)
    node: Origin | None = None
    for draft in reversed(chain):
        event = made.get(draft)
        states = event.record.parents.get("states") if event else None
        commit = (states or "").rpartition("@")[2]
        node = Origin(
            draft=draft,
            at=event.at if event else None,
            facts=event.record.facts if event else {},
            states=states,
            windows=tuple(sorted(windows.get(commit, ()))),
            verdicts=tuple(verdicts.get(draft, ())),
            generations=tuple(c.generation for c in generations if c.draft == draft),
            parent=node,
            erasures=tuple((erasures or {}).get(commit, ())),
        )
    assert node is not None
    return node


def _chain(digest: str, made: Mapping[str, Event]) -> list[str]:
    """A draft, its parent, and so on."""
    chain, seen, current = [], set[str](), digest
    while current and current not in seen:  # a loop cannot be made by digests; a forged log must not hang us
        seen.add(current)
        chain.append(current)
        current = made[current].record.parents.get("draft", "") if current in made else ""
    return chain


def _candidates(log: Sequence[Event]) -> dict[str, Event]:
    return {e.record.subject: e for e in reversed(log) if e.record.kind == "candidate"}


def _verdicts(log: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in reversed(log):
        if event.record.kind == "verdict":
            found.setdefault(event.record.parents.get("candidate", ""), []).append(event)
    return found


def windows_of(commits: Iterable[Logged], wanted: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Harvest windows that each wanted commit of a states repository holds, by the records of its ancestors.

    Args:
        commits: a log that reaches every wanted commit.
        wanted: commit ids; one that the log does not reach gets no windows.
    """
    by_id = {commit.id: commit for commit in commits}
    starts = set(wanted)
    names: dict[str, int] = {}
    held: dict[str, int] = {}  # bit n of a commit: it holds window n
    for commit in _oldest_first(starts, by_id):
        bits = 0
        for parent in commit.parents:
            bits |= held.get(parent, 0)
        record = LineageRecord.from_metadata(commit.metadata)
        if record is not None and record.kind == "states":
            bits |= 1 << names.setdefault(record.subject, len(names))
        held[commit.id] = bits
    windows = sorted(names.items())
    return {start: tuple(name for name, bit in windows if held.get(start, 0) >> bit & 1) for start in starts}


def _oldest_first(starts: Iterable[str], by_id: Mapping[str, Logged]) -> list[Logged]:
    """Everything that is reached from some commits, each after its parents: once, however many starts there are."""
    order: list[Logged] = []
    seen, todo = set[str](), [(start, False) for start in starts]
    while todo:
        id, parents_done = todo.pop()
        if parents_done:
            order.append(by_id[id])
        elif id in by_id and id not in seen:
            seen.add(id)
            todo.append((id, True))
            todo += [(parent, False) for parent in by_id[id].parents]
    return order
