"""A candidate on its branch: how a draft folder with its record is published to the drafts repository.

Works over the Store port. Knows nothing of who trained the draft or what becomes of it.
"""

from __future__ import annotations

from pathlib import Path

from tide import lineage, repositories
from tide.config import Policy
from tide.domain import DraftModel, DriftReport, PoolChoice
from tide.draft_files import load_draft, write_record
from tide.rollout import DRAFT_FILES, draft_prefix
from tide.serving_file import SIGNED_VERDICT
from tide.store.base import Store

POLICY_FILE = "policy.json"
"""Beside a draft in the drafts repository: what it was trained by, so that it can be made again."""
POOL_FILE = "pool.json"
"""Beside a draft that served before: why it was proposed again, the last time."""


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

    Args:
        folder: draft folder; the record is written beside the weights first.
        policy: what it was trained by; None for a draft that was not trained here and now.

    Raises:
        DraftError: the folder does not hold the draft of the record.
    """
    load_draft(folder, expected=draft.digest)
    write_record(folder, draft)
    repositories.ensure_drafts(store, repository)
    store.create_branch(repository, branch, "main")
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
