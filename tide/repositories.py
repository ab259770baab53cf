"""The two repositories of a service, as TIDE wants them: `main` takes merges only.

Works over the Store port. Knows nothing of what stands in them.
"""

from __future__ import annotations

from tide.store.base import Store

MAIN = "main"
CANDIDATE = "candidate-"
"""How the branch of a candidate begins; one branch a candidate."""


def ensure(store: Store, repository: str) -> None:
    """Create a repository with a protected ``main``; one that exists is left as it is.

    A crash between the two leaves it unprotected: `tide doctor` finds that, and `tide init` mends it.
    """
    if store.create_repository(repository):
        store.protect(repository, MAIN)


def candidate_branches(store: Store, drafts: str) -> list[str]:
    """Branches of a drafts repository that hold candidates. Raises NotFound when there is no such repository."""
    return [branch for branch in store.branches(drafts) if branch.startswith(CANDIDATE)]


def mend(store: Store, repository: str) -> None:
    """Create what is missing and protect ``main``."""
    store.create_repository(repository)
    if MAIN not in store.protected(repository):
        store.protect(repository, MAIN)
