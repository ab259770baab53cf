"""Pool: before a draft is trained, those that served before are walked over what is served now."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prefect import get_run_logger

from tasks.stage import cache_folder, stage
from tasks.train import walk_selection
from tide import wiring
from tide.domain import DraftModel, DriftReport, PoolChoice, Snapshot
from tide.lineage import ledger
from tide.models import candidates, pool
from tide.repositories import CANDIDATE, MAIN
from tide.serving import rollout
from tide.serving.serving_file import read_promotions


@stage("look in the pool")
def look_in_pool(snapshot: Snapshot, drift: DriftReport) -> str | None:
    """Propose the draft that served before and fits the drifted traffic best; its gate is that of any candidate.

    Returns:
        The branch of the drafts repository that holds it as a candidate; None when there is none, or it is no better
        than the incumbent. Either way the ledger says why.
    """
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    serving = rollout.read_serving(store, drafts)
    if serving.stable is None or not pool.wanted(drift):
        return None
    incumbent = rollout.read_draft(store, drafts, MAIN, serving.stable.digest)
    fit, left_out = _members(incumbent, snapshot)
    choice = _choose(incumbent, fit, left_out, snapshot)
    ledger.append(store, drafts, "pool", choice)
    get_run_logger().info("pool: %s", choice.reason)
    if choice.chosen is None:
        return None
    branch = f"{CANDIDATE}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-pool-{choice.chosen[:8]}"
    candidates.propose_again(store, drafts, branch, choice)
    return branch


def _members(incumbent: DraftModel, snapshot: Snapshot) -> tuple[list[DraftModel], dict[str, str]]:
    """Drafts that may be walked, the one that served last first, and why others may not."""
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    digests = pool.members(read_promotions(store, drafts), incumbent.digest, config.policy().pool_drafts)
    records = [rollout.read_draft(store, drafts, MAIN, digest) for digest in digests]
    reasons = {record.digest: pool.unfit(record, incumbent, snapshot.target) for record in records}
    fit = [record for record in records if reasons[record.digest] is None]
    return fit, {digest: reason for digest, reason in reasons.items() if reason}


def _choose(
    incumbent: DraftModel, fit: Sequence[DraftModel], left_out: Mapping[str, str], snapshot: Snapshot
) -> PoolChoice:
    if not fit:
        return pool.nothing(incumbent.digest, "no other draft that fits served before", snapshot.commit, left_out)
    config = wiring.settings()
    store = wiring.store(config)
    reports = []
    for draft in (incumbent, *fit):
        folder = rollout.install_draft(store, config.drafts_repository, MAIN, draft.digest, cache_folder("drafts"))
        report = walk_selection(folder, snapshot)
        if report is None:
            reason = "no selection requests to walk the drafts over"
            return pool.nothing(incumbent.digest, reason, snapshot.commit, left_out)
        reports.append(report)
    return pool.choose(reports[0], reports[1:], config.policy().promotion.min_gain, left_out=left_out)
