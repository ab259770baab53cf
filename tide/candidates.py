"""A candidate on its branch: how a draft folder with its record is published to the drafts repository.

Works over the Store port. Knows nothing of who trained the draft or what becomes of it.
"""

from __future__ import annotations

from pathlib import Path

from tide import lineage, repositories
from tide.config import Policy
from tide.domain import DraftModel, DriftReport
from tide.draft_files import load_draft, write_record
from tide.rollout import DRAFT_FILES, draft_prefix
from tide.store.base import Store

POLICY_FILE = "policy.json"
"""Beside a draft in the drafts repository: what it was trained by, so that it can be made again."""


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
