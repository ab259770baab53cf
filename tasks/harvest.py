"""Harvest: the closed windows of this host's spool become commits of states, in the order of tide/states/harvest.py."""

from __future__ import annotations

import time

import torch
from prefect import get_run_logger

from tasks.stage import stage
from tide import wiring
from tide.config import Settings
from tide.domain import Erasure, HarvestResult, TargetContract
from tide.lineage import ledger
from tide.models import target_files
from tide.states.harvest import Harvester


@stage("harvest spool")
def harvest_spool(replica: str | None = None) -> HarvestResult:
    """Bring every closed window of this host's spool into the states repository.

    Args:
        replica: name of the replica that fills the spool; the first of TIDE_REPLICAS when not given.
    """
    config = wiring.settings()
    target, head = _expected(config)
    store = wiring.store(config)
    result = Harvester(
        store=store,
        spool=config.spool_folder,
        repository=config.states_repository,
        replica=replica or next(iter(config.replica_urls)),
        window_s=config.policy().capture.window_s,
        expected_target=target,
        head=head,
        erased=ledger.every(store, config.drafts_repository, ledger.ERASURE, Erasure),
    ).run(time.time())
    get_run_logger().info(summary(result))
    return result


def _expected(config: Settings) -> tuple[TargetContract | None, torch.Tensor | None]:
    """Contract and lm_head ([V, H] float32) of the target that serves, from its bundle; neither when there is none.

    float32: a CPU without bfloat16 instructions multiplies bfloat16 ten times slower.
    """
    if not config.bundle.is_dir():
        get_run_logger().warning("no target bundle at %s: shards are only checked against each other", config.bundle)
        return None, None
    _, head = target_files.head_keys(config.bundle)
    return target_files.bundle_contract(config.bundle), target_files.load_tensor(config.bundle, head).float()


def summary(result: HarvestResult) -> str:
    """One line for the log."""
    if not result.windows:
        return "no window has closed yet"
    counts = (
        f"{len(result.windows)} windows: {result.shards} shards, {result.rows} rows, {result.requests} requests, "
        f"{result.size / 1e6:.0f} MB"
    )
    refused = ", ".join(f"{number} {rule}" for rule, number in result.quarantined.items())
    notes = [f"{result.duplicates} duplicates"] if result.duplicates else []
    notes += [f"quarantined {refused}"] if refused else []
    notes += [f"capture dropped {result.dropped}"] if result.dropped else []
    return "; ".join([counts, *notes])
