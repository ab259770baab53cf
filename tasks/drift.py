"""Drift: whether retraining pays, decided on the request table alone, with a report for people beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.events import announce
from tasks.stage import cache_folder, stage
from tide import wiring
from tide.domain import DraftModel, DriftReport, Snapshot
from tide.drift import report as drift_report
from tide.drift import rule as drift
from tide.drift.baseline import Baseline
from tide.lineage import ledger
from tide.serving import rollout
from tide.serving.serving_file import read_promotion
from tide.states import capture_rate, requests, snapshots
from tide.states.request_stats import RequestStats
from tide.watching import events


@stage("detect drift")
def detect_drift(snapshot: Snapshot) -> DriftReport:
    """Decide, write the decision to the ledger, and show it. Evidently's report never stops or decides the gate."""
    config = wiring.settings()
    policy, store = config.policy(), wiring.store(config)
    incumbent = serving_draft()
    previous = ledger.newest(store, config.drafts_repository, "drift", DriftReport)
    stats = request_stats(snapshot, incumbent)
    baseline = drift.freeze_baseline(stats, policy.drift, draft=incumbent.digest) if incumbent else None
    available = _training_rows(snapshot, incumbent)
    report = drift.decide(
        baseline,
        drift.window_of(stats, policy.drift, incumbent=incumbent, previous=previous),
        policy.drift,
        incumbent=incumbent,
        trained_tokens_available=available,
        previous=previous,
        states_commit=snapshot.commit,
    )
    rate = capture_rate.after(report, stats, policy, incumbent, available, snapshot.target)
    report = report.model_copy(update={"figures": {**report.figures, "capture_rate": rate}})
    record(report, _evidently(stats, baseline, snapshot.commit) if baseline else {})
    if report.decision == "retrain":
        why = "; ".join(report.reasons)
        announce(events.DRIFT_DETECTED, events.of_service(config.service), cause=report.cause or "", reasons=why)
    return report


def request_stats(snapshot: Snapshot, incumbent: DraftModel | None) -> RequestStats:
    """Requests since the incumbent was put into serving; all there are without one."""
    since = in_serving_since() if incumbent else 0.0
    stats = drift.stats_from_table(request_table(snapshot, since))
    return stats.take(stats.finished_at > since)


def request_table(snapshot: Snapshot, since: float) -> Any:
    """Rows of the windows that hold requests since a time, and some before it, as a ``pyarrow.Table``."""
    store, folder = wiring.store(wiring.settings()), cache_folder("requests")
    return requests.read_table(
        snapshots.fetch_request_tables(store, snapshot.repository, snapshot.commit, folder, since=since)
    )


def serving_draft() -> DraftModel | None:
    """The record of the draft in serving; None when there is none."""
    config = wiring.settings()
    store = wiring.store(config)
    stable = rollout.read_serving(store, config.drafts_repository).stable
    return rollout.read_draft(store, config.drafts_repository, "main", stable.digest) if stable else None


def record(report: DriftReport, attachments: Mapping[str, bytes]) -> None:
    """Write a report to the ledger, what belongs to it beside it, and show it."""
    config = wiring.settings()
    path = ledger.append(wiring.store(config), config.drafts_repository, "drift", report, attachments=attachments)
    _show(report, path if attachments else None)


def _evidently(stats: RequestStats, baseline: Baseline, commit: str) -> dict[str, bytes]:
    """Evidently's report on the requests since the baseline against the baseline's; empty when it cannot be made."""
    later = stats.finished_at > baseline.until
    current, reference = (drift_report.frame_of(stats.take(rows)) for rows in (later, ~later))
    path = drift_report.render(current, reference, cache_folder("reports") / f"drift-{commit[:16]}.html")
    if path is None:
        return {}
    return {".html": path.read_bytes(), ".evidently.json": path.with_suffix(".json").read_bytes()}


def in_serving_since() -> float:
    """When the incumbent was put into serving this time: a draft that comes back is no longer judged by its first."""
    config = wiring.settings()
    store = wiring.store(config)
    generation = rollout.read_serving(store, config.drafts_repository).generation
    return read_promotion(store, config.drafts_repository, generation).at


def _training_rows(snapshot: Snapshot, incumbent: DraftModel | None) -> int:
    """Training rows captured since the incumbent was trained; all there are when it was not trained by us."""
    store = wiring.store(wiring.settings())
    since = incumbent.created_at if incumbent and not incumbent.imported else 0.0
    shards = snapshots.manifests(store, snapshot.repository, snapshot.commit, "train")
    return sum(m.rows for _, m in shards if m.closed_at > since)


def _show(report: DriftReport, path: str | None) -> None:
    figures = "\n".join(f"| {k} | {_figure(v)} |" for k, v in sorted(report.figures.items()))
    reasons = "\n".join(f"- {r}" for r in report.reasons)
    cause = f" ({report.cause})" if report.cause else ""
    evidently = f"\n\nEvidently report: `{path.removesuffix('.json')}.html` on the ledger branch" if path else ""
    text = f"## {report.decision}{cause}\n\n{reasons}\n\n| figure | value |\n|---|---|\n{figures}{evidently}"
    create_markdown_artifact(key="drift", markdown=text, description=f"drift: {report.decision}{cause}")
    get_run_logger().info("drift: %s%s: %s", report.decision, cause, "; ".join(report.reasons))


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"
