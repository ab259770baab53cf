"""Serve: what runs on a replica's host to make it match ``serving.json``."""

from __future__ import annotations

from typing import TypedDict

from tasks.stage import stage
from tide import wiring
from tide.domain import ReplicaSwap
from tide.serving import rollout


class Drafting(TypedDict):
    """How a verify step is drafted, as `Evaluator.evaluate` takes it."""

    steps: int
    topk: int
    draft_tokens: int | None
    """Of a tree; None for a chain."""


def drafting() -> Drafting:
    """How serving drafts; a chain of the policy's steps while nothing is drafted yet."""
    config = wiring.settings()
    facts = wiring.engines(config)[0].facts()
    if not facts.speculative_steps:
        return Drafting(steps=config.policy().draft_steps, topk=1, draft_tokens=None)
    tokens = facts.draft_tokens if facts.speculative_topk > 1 else None
    return Drafting(steps=facts.speculative_steps, topk=facts.speculative_topk, draft_tokens=tokens)


@stage("reconcile replicas")
def reconcile_replicas() -> list[ReplicaSwap]:
    """Swap every replica whose draft is not the stable one; returns what was changed, and who is out of service."""
    config = wiring.settings()
    signer = wiring.authority(config) if config.signing_key_file else wiring.trusted(config)
    return rollout.reconcile(wiring.site(config), signer)
