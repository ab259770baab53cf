"""Reads history and lineage out of the repositories: the logs that `tide.lineage.history` makes views of.

Works over the Store port: two logs and the ledger's erasures, whatever the number of windows and drafts. Knows nothing
of how a view looks.
"""

from __future__ import annotations

from collections.abc import Iterable

from tide import repositories
from tide.domain import Erasure
from tide.errors import NotFound
from tide.lineage import history, ledger
from tide.lineage.history import Event, Origin, Served
from tide.store.base import Store


def changes(store: Store, drafts: str) -> list[Served]:
    """Every generation of a drafts repository, oldest first; empty when it does not exist yet."""
    try:
        return history.served(history.events(store.log(drafts, "main")))
    except NotFound:
        return []


def trace(store: Store, drafts: str, name: str) -> Origin:
    """Where a draft comes from.

    Args:
        name: see `tide.lineage.history.find`. Drafts that were never promoted are found on their branches.

    Raises:
        NotFound: no such draft, or no drafts repository.
    """
    log = history.events(store.log(drafts, "main"))
    try:
        digest = history.find(name, log)
    except NotFound:
        log = _with_candidates(store, drafts, log)
        digest = history.find(name, log)
    windows = _windows(store, history.states_of(digest, log))
    return history.origin(digest, log, windows, _erasures(store, drafts))


def _erasures(store: Store, drafts: str) -> dict[str, list[str]]:
    """Ids of erasures by the states commits that lost rows."""
    found: dict[str, list[str]] = {}
    for record in ledger.every(store, drafts, ledger.ERASURE, Erasure):
        for commit in record.commits:
            found[commit] = [*dict.fromkeys([*found.get(commit, ()), record.id])]
    return found


def _with_candidates(store: Store, drafts: str, log: list[Event]) -> list[Event]:
    branches = repositories.candidate_branches(store, drafts)
    found = [commit for branch in branches for commit in store.log(drafts, branch)]
    return [*log, *history.events(found)]


def _windows(store: Store, states: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Windows of states commits, each ``repository@commit``: one log a repository."""
    wanted: dict[str, list[str]] = {}
    for name in states:
        repository, found_at, commit = name.partition("@")
        if found_at:
            wanted.setdefault(repository, []).append(commit)
    found: dict[str, tuple[str, ...]] = {}
    for repository, commits in wanted.items():
        try:
            found |= history.windows_of(store.log(repository, "main"), commits)
        except NotFound:  # the repository was deleted; the tree says that no windows were found
            continue
    return found
