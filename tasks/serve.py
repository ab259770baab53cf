"""Serve: what runs on a replica's host to make it match ``serving.json``."""

from __future__ import annotations

from tasks.stage import stage
from tide import rollout, wiring
from tide.domain import ReplicaSwap


def serving_steps() -> int:
    """Draft steps of a verify step in serving; those of the policy while nothing is drafted yet."""
    config = wiring.settings()
    return wiring.engines(config)[0].facts().speculative_steps or config.policy().draft_steps


@stage("reconcile replicas")
def reconcile_replicas() -> list[ReplicaSwap]:
    """Swap every replica whose active draft is not the stable one; returns what was changed."""
    config = wiring.settings()
    return rollout.reconcile(wiring.site(config), wiring.trusted(config))
