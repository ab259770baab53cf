"""Cost: whether the training that the drift gate asks for pays."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger

from tasks.drift import in_serving_since, request_table
from tasks.serve import drafting
from tasks.stage import stage
from tasks.throughput import load_of, profile_for
from tide import wiring
from tide.domain import DriftReport, PoolChoice, Snapshot, Verdict
from tide.lineage import ledger
from tide.serving.serving_file import read_serving
from tide.throughput import cost


@stage("weigh cost")
def weigh_cost(snapshot: Snapshot, report: DriftReport) -> DriftReport:
    """The report with the cost rule's word on it, which the ledger gets with its figures; off without a cost."""
    config = wiring.settings()
    policy, store, drafts = config.policy().cost, wiring.store(config), config.drafts_repository
    traffic, steps = _traffic(snapshot) if policy.on else None, drafting()["steps"]
    profile = profile_for(snapshot.target, steps=steps) if policy.on else None
    decision = cost.decide(
        report,
        policy,
        traffic,
        _past(traffic.proposed_per_step) if traffic else cost.History(),
        steps=steps,
        profile=profile,
        concurrency=load_of(snapshot).concurrency if profile else None,
    )
    ledger.append(store, drafts, "cost", decision)
    get_run_logger().info("cost: %s", "; ".join(decision.reasons))
    return cost.amend(report, decision)


def _traffic(snapshot: Snapshot) -> cost.Traffic | None:
    """Of the requests served since the incumbent was put into serving."""
    config = wiring.settings()
    stable = read_serving(wiring.store(config), config.drafts_repository).stable
    if stable is None:
        return None
    since = in_serving_since()
    return cost.traffic_of(request_table(snapshot, since), since=since, draft=stable.digest)


def _past(proposed_per_step: float) -> cost.History:
    """What earlier retrains brought, from the ledger; drafts of the pool were not trained for what they recovered."""
    config = wiring.settings()
    where: tuple[Any, str] = (wiring.store(config), config.drafts_repository)
    pooled = {(c.states_commit, c.chosen) for c in ledger.every(*where, "pool", PoolChoice)}
    verdicts = [v for v in ledger.every(*where, "verdict", Verdict) if (v.states_commit, v.candidate) not in pooled]
    return cost.history(ledger.every(*where, "drift", DriftReport), verdicts, proposed_per_step)
