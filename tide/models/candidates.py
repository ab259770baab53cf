"""A candidate on its branch: how a draft folder with its record is published to the drafts repository.

Owns that a branch holds one candidate, and the name of the branch that a training's inputs lead to. Works over the
Store port. Knows nothing of who trained the draft or what becomes of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tide import repositories
from tide.config import Policy
from tide.domain import DraftModel, DriftReport, PoolChoice
from tide.errors import Conflict, NotFound
from tide.lineage import metadata as lineage
from tide.models.draft_files import load_draft, write_record
from tide.serving.replicas import DRAFT_FILES
from tide.serving.serving_file import SIGNED_VERDICT, candidate_on, draft_prefix
from tide.store.base import Store

POLICY_FILE = "policy.json"
"""Beside a draft in the drafts repository: what it was trained by, so that it can be made again."""
POOL_FILE = "pool.json"
"""Beside a draft that served before: why it was proposed again, the last time."""


def branch_of(states_commit: str, parent: str | None, policy: Policy) -> str:
    """The branch of the candidate that is trained from a parent on a states commit under a policy.

    The same inputs, seed included, make the same draft: by this name a later cycle finds what an earlier one trained.
    """
    key = hashlib.sha256(f"{states_commit} {parent or 'none'} {policy.digest()}".encode()).hexdigest()
    return f"{repositories.CANDIDATE}{states_commit[:8]}-{key[:16]}"


def published(store: Store, repository: str, branch: str) -> str | None:
    """Digest of the candidate that a branch holds, committed; None when there is none (yet)."""
    try:
        return candidate_on(store, repository, branch)
    except NotFound:
        return None


def publish(
    store: Store,
    repository: str,
    branch: str,
    folder: Path,
    draft: DraftModel,
    drift: DriftReport | None,
    policy: Policy | None = None,
) -> None:
    """Put weights, configuration and record on a branch of their own, with their lineage.

    Again with the same draft is harmless; what a killed run had staged is dropped first.

    Args:
        folder: draft folder; the record is written beside the weights first.
        policy: what it was trained by; None for a draft that was not trained here and now.

    Raises:
        DraftError: the folder does not hold the draft of the record.
        Conflict: the branch holds another candidate.
    """
    load_draft(folder, expected=draft.digest)
    write_record(folder, draft)
    repositories.ensure_drafts(store, repository)
    store.create_branch(repository, branch, "main")
    if held := published(store, repository, branch):
        if held == draft.digest:
            return
        raise Conflict(
            f"{repository}@{branch} holds candidate {held[:12]} already, and this is {draft.digest[:12]}: a branch has "
            "one candidate; publish on another branch"
        )
    store.reset(repository, branch)
    for name in DRAFT_FILES:
        store.put(repository, branch, f"{draft_prefix(draft.digest)}{name}", folder / name)
    if policy is not None:
        store.put(repository, branch, f"{draft_prefix(draft.digest)}{POLICY_FILE}", policy.to_json().encode())
    store.commit(
        repository, branch, f"candidate {draft.digest[:12]}", lineage.candidate_record(draft, drift).to_metadata()
    )


def propose_again(store: Store, repository: str, branch: str, choice: PoolChoice) -> None:
    """Put a draft that stands on main on a branch of its own as a candidate, with why; its files are there already.

    The verdict by which it was promoted before does not count any more: the gate's new one takes its place.
    """
    assert choice.chosen is not None
    prefix = draft_prefix(choice.chosen)
    store.create_branch(repository, branch, repositories.MAIN)
    store.delete(repository, branch, prefix + SIGNED_VERDICT)
    store.put(repository, branch, prefix + POOL_FILE, choice.to_json().encode())
    store.commit(repository, branch, f"pooled {choice.chosen[:12]}", lineage.pooled_record(choice).to_metadata())
