"""The two repositories of a service, as TIDE wants them: `main` takes merges only, and on the drafts' a hook guards it.

Works over the Store port. Knows nothing of what stands in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib import resources

from tide.errors import NotFound, NothingToCommit
from tide.lineage import metadata as lineage
from tide.store.base import Store

MAIN = "main"
CANDIDATE = "candidate-"
"""How the branch of a candidate begins; one branch a candidate."""
GUARD = "_lakefs_actions/tide.yaml"
"""The pre-merge action of the drafts repository; lakeFS reads it from the commit that is merged."""


def guard_action() -> bytes:
    """The action file: guard.lua, run before a merge into main."""
    script = resources.files("tide").joinpath("guard.lua").read_text()
    # JSON is YAML: no script can break out of it.
    action = {
        "name": "tide",
        "on": {"pre-merge": {"branches": [MAIN]}},
        "hooks": [{"id": "attested", "type": "lua", "properties": {"script": script}}],
    }
    return json.dumps(action, indent=1).encode()


def ensure(store: Store, repository: str) -> None:
    """Create a repository with a protected ``main``; one that exists is left as it is.

    A crash between the two leaves it unprotected: `tide doctor` finds that, and `tide init` mends it.
    """
    if store.create_repository(repository):
        store.protect(repository, MAIN)


def ensure_drafts(store: Store, repository: str) -> None:
    """The same for a drafts repository, with its guard."""
    if store.create_repository(repository):
        # Protected before anything is written: lakeFS keeps the rules it read for some seconds.
        store.protect(repository, MAIN)
        _install_guard(store, repository)


def candidate_branches(store: Store, drafts: str) -> list[str]:
    """Branches of a drafts repository that hold candidates. Raises NotFound when there is no such repository."""
    return [branch for branch in store.branches(drafts) if branch.startswith(CANDIDATE)]


def guarded(store: Store, drafts: str) -> bool:
    """True when the guard stands on main as this version of TIDE has it."""
    try:
        return store.read(drafts, MAIN, GUARD) == guard_action()
    except NotFound:
        return False


def mend(store: Store, repository: str) -> None:
    """Create what is missing and protect ``main``."""
    store.create_repository(repository)
    if MAIN not in store.protected(repository):
        store.protect(repository, MAIN)


def mend_drafts(store: Store, repository: str) -> None:
    """The same for a drafts repository; a missing or older guard is replaced."""
    ensure_drafts(store, repository)
    mend(store, repository)
    if guarded(store, repository):
        return
    _install_guard(store, repository)


def _install_guard(store: Store, repository: str) -> None:
    """By a merge like any other."""
    record = lineage.guard_record(_guard_digest()).to_metadata()
    branch = f"guard-{_guard_digest()[:12]}"
    store.create_branch(repository, branch, MAIN)
    store.reset(repository, branch)
    store.put(repository, branch, GUARD, guard_action())
    with contextlib.suppress(NothingToCommit):  # a killed run got so far
        store.commit(repository, branch, "guard main", record)
    store.merge(repository, branch, MAIN, "guard main", record)
    store.delete_branch(repository, branch)


def _guard_digest() -> str:
    return hashlib.sha256(guard_action()).hexdigest()
