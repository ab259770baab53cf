"""Promote and roll back: the rollout, as one task, its artifact and its place in the ledger."""

from __future__ import annotations

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.events import announce
from tasks.stage import stage
from tide import events, ledger, rollout, wiring
from tide.domain import Promotion
from tide.errors import Conflict


@stage("roll out")
def roll_out(branch: str, digest: str, expected_generation: int) -> Promotion | None:
    """Put a candidate into serving on every replica, or restore the incumbent and say why.

    None when another promotion was faster: the verdict is stale, and the candidate must be judged again.
    """
    config = wiring.settings()
    try:
        promotion = rollout.promote(
            wiring.site(config),
            wiring.authority(config),
            candidate_ref=branch,
            digest=digest,
            expected_generation=expected_generation,
        )
    except Conflict as error:
        get_run_logger().warning("not promoted: %s", error)
        return None
    _record(promotion)
    return promotion


@stage("roll back")
def roll_back(expected_generation: int | None = None) -> Promotion:
    """Put the previous draft back, as a new generation."""
    config = wiring.settings()
    promotion = rollout.rollback(wiring.site(config), wiring.authority(config), expected_generation=expected_generation)
    _record(promotion)
    return promotion


def _record(promotion: Promotion) -> None:
    config = wiring.settings()
    signed = wiring.signing_key(config).sign(promotion.kind, promotion)
    ledger.append(wiring.store(config), config.drafts_repository, promotion.kind, promotion, signed=signed)
    lines = [f"- {r.replica}: {r.before[:12]} -> {r.after[:12]} in {r.seconds:.3f} s" for r in promotion.replicas]
    title = f"{promotion.kind}: generation {promotion.generation}, draft {promotion.draft[:12]}"
    create_markdown_artifact(key="promotion", markdown="\n".join([f"## {title}", *lines]), description=title)
    event = events.DRAFT_PROMOTED if promotion.kind == "promotion" else events.DRAFT_ROLLED_BACK
    generation, previous = str(promotion.generation), promotion.previous or ""
    announce(event, events.of_draft(promotion.draft), generation=generation, previous=previous)
