"""Drift: whether retraining pays, decided on the request table alone, with a report for people beside it."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.stage import cache_folder, stage
from tide import drift, drift_report, ledger, requests, rollout, snapshots, wiring
from tide.baseline import Baseline
from tide.domain import DraftModel, DriftReport, Snapshot
from tide.request_stats import RequestStats
from tide.serving_file import read_promotion


@stage("detect drift")
def detect_drift(snapshot: Snapshot) -> DriftReport:
    """Decide, write the decision to the ledger, and show it. Evidently's report never stops or decides the gate."""
    config = wiring.settings()
    policy, store = config.policy().drift, wiring.store(config)
    incumbent = _incumbent()
    since = _in_serving_since() if incumbent else 0.0
    table = requests.read_table(
        snapshots.fetch_request_tables(
            store, snapshot.repository, snapshot.commit, cache_folder("requests"), since=since
        )
    )
    previous = ledger.newest(store, config.drafts_repository, "drift", DriftReport)
    stats = drift.stats_from_table(table)
    stats = stats.take(stats.finished_at > since)
    baseline = drift.freeze_baseline(stats, policy, draft=incumbent.digest) if incumbent else None
    report = drift.decide(
        baseline,
        drift.window_of(stats, policy, incumbent=incumbent, previous=previous),
        policy,
        incumbent=incumbent,
        trained_tokens_available=_training_rows(snapshot, incumbent),
        previous=previous,
        states_commit=snapshot.commit,
    )
    html = _evidently(stats, baseline, snapshot.commit) if baseline else None
    attachments = {".html": html} if html else {}
    path = ledger.append(store, config.drafts_repository, "drift", report, attachments=attachments)
    _show(report, path if html else None)
    return report


def _evidently(stats: RequestStats, baseline: Baseline, commit: str) -> bytes | None:
    """Evidently's report on the requests since the baseline against the baseline's; None when it cannot be made."""
    later = stats.finished_at > baseline.until
    current, reference = (drift_report.frame_of(stats.take(rows)) for rows in (later, ~later))
    path = drift_report.render(current, reference, cache_folder("reports") / f"drift-{commit[:16]}.html")
    return path.read_bytes() if path else None


def _incumbent() -> DraftModel | None:
    config = wiring.settings()
    store = wiring.store(config)
    stable = rollout.read_serving(store, config.drafts_repository).stable
    return rollout.read_draft(store, config.drafts_repository, "main", stable.digest) if stable else None


def _in_serving_since() -> float:
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
