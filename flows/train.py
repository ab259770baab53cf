"""Training, on the mi250 pool: a candidate draft from a states commit."""

from __future__ import annotations

from prefect import flow

from tasks.train import (
    fetch_parent,
    find_candidate,
    preflight,
    publish_candidate,
    select_checkpoint,
    train_draft,
    verify_parent,
)
from tasks.version import fetch_training_shards, pin_snapshot
from tide.domain import DraftModel, DriftReport


@flow(name="train", log_prints=True)
def train(branch: str, states_ref: str = "main", drift: DriftReport | None = None) -> DraftModel:
    """Train a candidate and publish it on ``branch`` of the drafts repository; one that is there already is enough.

    Args:
        branch: branch to publish on; the caller finds the candidate there.
        states_ref: states commit (or branch) to train on.
        drift: the report that asked for it, for the lineage.
    """
    if trained := find_candidate(branch):
        return trained
    snapshot = pin_snapshot(states_ref)
    parent = fetch_parent()
    preflight(snapshot, parent)
    shards = fetch_training_shards(snapshot)
    verify_parent(parent)
    result = train_draft(snapshot, shards, parent)
    chosen = select_checkpoint(result, snapshot)
    return publish_candidate(branch, chosen, result, snapshot, parent, drift)
