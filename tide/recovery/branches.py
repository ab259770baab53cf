"""Branches that a run which died left behind: which are done with and go, and which must stay, and why.

Owns the rules for ``harvest-*``, ``serving-*`` and ``candidate-*``. Works over the Store port. What is still to be done
with a branch is the affair of the stage that made it, which goes on where it was: here only that goes which holds
nothing that main does not. A branch with staged objects is never deleted, nor one that a run at work may be using.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from tide import repositories
from tide.errors import Conflict, NotFound
from tide.repositories import CANDIDATE
from tide.serving.serving_file import candidate_on, read_serving, tidy_up
from tide.states import window_branch
from tide.store.base import Store

HARVESTS = frozenset({"harvest", "adapt"})
"""Flows that write harvest branches."""
TRAININGS = frozenset({"train", "adapt", "promote"})
"""Flows that write candidates' branches."""
_WINDOW = re.compile(r"harvest-(\d{8}T\d{6}Z)-(.+)")
_SERVING = re.compile(r"serving-(\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Leftover:
    """A branch that nobody works on."""

    repository: str
    branch: str
    done: bool
    """True when it can go."""
    why: str


def find(store: Store, states: str, drafts: str, busy: Collection[str]) -> list[Leftover]:
    """Branches left behind in both repositories; one that does not exist yet has none.

    Args:
        busy: flows that are at work; what they may be writing is not looked at.
    """
    found: list[Leftover] = []
    if not HARVESTS & set(busy):
        found += _in(store, states, _harvests)
    found += _in(store, drafts, _servings)
    if not TRAININGS & set(busy):
        found += _in(store, drafts, _candidates)
    return found


def remove(store: Store, leftover: Leftover) -> bool:
    """Delete a branch that is done with. False when something was staged on it since, which stays."""
    try:
        store.delete_branch(leftover.repository, leftover.branch)
    except Conflict:
        return False
    except NotFound:
        return True  # another was faster
    return True


def finish_serving(store: Store, drafts: str) -> bool:
    """Give main's generation its tag, which a promotion that died after its merge owes. True when it was missing."""
    serving = read_serving(store, drafts)
    if serving.stable is None:
        return False
    tag = f"gen-{serving.generation:06d}-{serving.stable.digest[:12]}"
    if tag in dict(store.tags(drafts)):
        return False
    tidy_up(store, drafts, serving)
    return True


def _in(store: Store, repository: str, rule: Callable[[Store, str, str], Iterator[Leftover]]) -> list[Leftover]:
    try:
        branches = sorted(store.branches(repository))
    except NotFound:
        return []
    found: list[Leftover] = []
    for branch in branches:
        try:
            found += rule(store, repository, branch)
        except NotFound:  # deleted while we looked: its run ended well
            continue
    return found


def _harvests(store: Store, repository: str, branch: str) -> Iterator[Leftover]:
    if not (match := _WINDOW.fullmatch(branch)):
        return
    window, replica = match.groups()
    if any(store.uncommitted(repository, branch)):
        yield Leftover(
            repository, branch, False, f"objects are staged: the next harvest of {replica} goes on with them"
        )
        return
    there, main = (window_branch.stored(store, repository, ref, window, replica) for ref in (branch, "main"))
    if there == main:
        yield Leftover(repository, branch, True, "its window is on main, or it never held one")
    else:
        why = f"committed and not merged: the next harvest of {replica} brings it to main, its files are in the spool"
        yield Leftover(repository, branch, False, why)


def _servings(store: Store, repository: str, branch: str) -> Iterator[Leftover]:
    if not (match := _SERVING.fullmatch(branch)):
        return
    generation, current = int(match[1]), read_serving(store, repository).generation
    if generation > current:
        return  # on its way, or dead before its merge: the same promotion goes on with it, the next one outdates it
    if any(store.uncommitted(repository, branch)):
        yield Leftover(repository, branch, False, "objects are staged on it")
        return
    yield Leftover(repository, branch, True, f"generation {current} serves: it was merged, or lost its race")


def _candidates(store: Store, repository: str, branch: str) -> Iterator[Leftover]:
    if not branch.startswith(CANDIDATE):
        return
    try:
        candidate_on(store, repository, branch)
    except NotFound:
        if any(store.uncommitted(repository, branch)):
            why = "a candidate is staged and not committed: training the same again completes it"
            yield Leftover(repository, branch, False, why)
        elif store.head(repository, branch).id in _history(store, repository):
            yield Leftover(repository, branch, True, "it never held a candidate")


def _history(store: Store, repository: str) -> set[str]:
    return {commit.id for commit in store.log(repository, repositories.MAIN)}
