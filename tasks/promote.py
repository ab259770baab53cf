"""Promote and roll back: the rollout, as one task, and its artifact."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from tasks.stage import stage
from tide import rollout, wiring
from tide.domain import Promotion


@stage("roll out")
def roll_out(branch: str, digest: str, verdict: str | None, expected_generation: int) -> Promotion:
    """Put a candidate into serving on every replica, or restore the incumbent and say why."""
    config = wiring.settings()
    promotion = rollout.promote(
        wiring.store(config),
        config.drafts_repository,
        candidate_ref=branch,
        digest=digest,
        verdict=verdict,
        expected_generation=expected_generation,
        replicas=wiring.engines(config),
        draft_dir=config.drafts,
        restart=wiring.restart(config),
    )
    _publish(promotion)
    return promotion


@stage("roll back")
def roll_back() -> Promotion:
    """Put the previous draft back, as a new generation."""
    config = wiring.settings()
    promotion = rollout.rollback(
        wiring.store(config),
        config.drafts_repository,
        replicas=wiring.engines(config),
        draft_dir=config.drafts,
        restart=wiring.restart(config),
    )
    _publish(promotion)
    return promotion


def _publish(promotion: Promotion) -> None:
    lines = [f"- {r.replica}: {r.before[:12]} -> {r.after[:12]} in {r.seconds:.3f} s" for r in promotion.replicas]
    title = f"{promotion.kind}: generation {promotion.generation}, draft {promotion.draft[:12]}"
    create_markdown_artifact(key="promotion", markdown="\n".join([f"## {title}", *lines]), description=title)
