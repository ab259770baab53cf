"""Promote and roll back: the rollout, as one task, its artifact and its place in the ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.events import announce
from tasks.stage import stage
from tide import wiring
from tide.domain import CanaryRefusal, CanaryReport, Promotion, ReplicaSwap
from tide.errors import CanaryBusy, Conflict
from tide.lineage import ledger
from tide.serving import rollout
from tide.serving.replicas import describe
from tide.watching import events

BUSY_S: Final = 5.0
"""Between two looks whether another candidate's trial is over."""


@stage("roll out")
def roll_out(branch: str, digest: str, expected_generation: int) -> Promotion | CanaryRefusal | None:
    """Put a candidate into serving on every replica, or restore the incumbent and say why; both are normal values.

    None when another promotion was faster: the verdict is stale, and the candidate must be judged again.
    """
    try:
        outcome = _in_turn(branch, digest, expected_generation)
    except Conflict as error:
        get_run_logger().warning("not promoted: %s", error)
        return None
    if isinstance(outcome, CanaryRefusal):
        _show_refusal(outcome)
        return outcome
    _record(outcome)
    return outcome


@stage("roll back")
def roll_back(expected_generation: int | None = None, to: str | None = None) -> Promotion:
    """Put the previous draft back, or another that was promoted before, as a new generation."""
    config = wiring.settings()
    promotion = rollout.rollback(
        wiring.site(config), wiring.authority(config), expected_generation=expected_generation, to=to
    )
    _record(promotion)
    return promotion


def _in_turn(branch: str, digest: str, expected_generation: int) -> Promotion | CanaryRefusal:
    """The rollout, once no other candidate is on trial: if that one is refused, the verdict still holds."""
    config, told = wiring.settings(), False
    while True:
        try:
            return rollout.promote(
                wiring.site(config),
                wiring.authority(config),
                candidate_ref=branch,
                digest=digest,
                expected_generation=expected_generation,
            )
        except CanaryBusy as busy:
            if not told:
                get_run_logger().info("%s", busy)
            told = True
            time.sleep(BUSY_S)


def _record(promotion: Promotion) -> None:
    config = wiring.settings()
    signed = wiring.signing_key(config).sign(promotion.kind, promotion)
    ledger.append(wiring.store(config), config.drafts_repository, promotion.kind, promotion, signed=signed)
    title = f"{promotion.kind}: generation {promotion.generation}, draft {promotion.draft[:12]}"
    _show(title, promotion.replicas, promotion.canary)
    event = events.DRAFT_PROMOTED if promotion.kind == "promotion" else events.DRAFT_ROLLED_BACK
    generation, previous = str(promotion.generation), promotion.previous or ""
    announce(event, events.of_draft(promotion.draft), generation=generation, previous=previous)


def _show_refusal(refusal: CanaryRefusal) -> None:
    """The record itself is in the ledger: the rollout writes it before it gives the canary's lease back."""
    title = f"refused by the canary ({refusal.report.outcome}): draft {refusal.lease.draft[:12]}"
    get_run_logger().warning("%s: %s", title, "; ".join(refusal.report.reasons))
    _show(title, refusal.replicas, refusal.report)


def _show(title: str, replicas: Sequence[ReplicaSwap], report: CanaryReport | None) -> None:
    lines = [f"- {describe(swap)}" for swap in replicas]
    if report is not None:
        lines += ["", f"canary: {report.outcome}: {'; '.join(report.reasons)}", "", "| figure | value |", "|---|---|"]
        lines += [f"| {name} | {'-' if v is None else f'{v:.4g}'} |" for name, v in sorted(report.figures.items())]
    for swap in replicas:
        if swap.out_of_service:
            get_run_logger().warning("%s", describe(swap))
    create_markdown_artifact(key="promotion", markdown="\n".join([f"## {title}", "", *lines]), description=title)
