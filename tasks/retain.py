"""Retain: old windows of states leave main, as policy says, with a table of what went and what stayed, and why."""

from __future__ import annotations

import time

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.stage import stage
from tide import wiring
from tide.states import pruning, retention
from tide.states.retention import RetentionPlan


@stage("plan retention")
def plan_retention() -> RetentionPlan:
    """What policy keeps and removes, shown as a table."""
    config = wiring.settings()
    policy, store = config.policy(), wiring.store(config)
    plan = pruning.plan(store, config.states_repository, config.drafts_repository, policy, time.time())
    summary = f"{len(plan.removed)} of {len(plan.windows)} windows leave main"
    text = retention.to_markdown(plan, policy.retention)
    create_markdown_artifact(key="retention", markdown=text, description=summary)
    get_run_logger().info(summary)
    if plan.over_bytes:
        get_run_logger().warning("%d bytes over max_bytes stay: live drafts were trained on them", plan.over_bytes)
    return plan


@stage("remove windows")
def remove_windows(plan: RetentionPlan) -> None:
    """Carry the plan out, and set lakeFS's garbage collection from the policy."""
    config = wiring.settings()
    pruning.apply(wiring.store(config), config.states_repository, plan, config.policy())
