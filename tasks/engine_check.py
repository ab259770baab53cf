"""Engine check: before a drift retrain the incumbent is walked over the window's own logged held-out requests."""

from __future__ import annotations

from tasks.drift import record, request_stats, serving_draft
from tasks.serve import drafting
from tasks.stage import cache_folder, stage
from tide import wiring
from tide.domain import DriftReport, RequestScore, Snapshot, Split, split_of
from tide.drift import rule as drift
from tide.drift.engine_check import check_engine as decide
from tide.drift.engine_check import evidence
from tide.errors import EvaluationError
from tide.serving import rollout
from tide.states import snapshots


@stage("check engine")
def check_engine(snapshot: Snapshot, report: DriftReport) -> DriftReport:
    """The drift report after the question who lost the acceptance; written to the ledger when it was asked."""
    if (report.decision, report.cause) != ("retrain", "drift"):
        return report
    config = wiring.settings()
    policy, incumbent = config.policy(), serving_draft()
    stats = request_stats(snapshot, incumbent)
    baseline = drift.freeze_baseline(stats, policy.drift, draft=report.incumbent)
    if baseline is None:
        return report  # promoted over meanwhile: the report is of a draft that serves no more
    window = evidence(report, stats)
    found, unwalked = _walk(snapshot, report.incumbent, set(window.request.tolist()))
    report = decide(report, baseline, window, found, policy.drift, tolerance=policy.offline_live_tolerance)
    report = report.model_copy(update={"reasons": (*report.reasons, *unwalked)})
    record(report, {})
    return report


def _walk(snapshot: Snapshot, digest: str, requests: set[str]) -> tuple[list[RequestScore], list[str]]:
    """Scores of the incumbent on the newest of these requests that were held out, and why there are none of a split."""
    config = wiring.settings()
    store = wiring.store(config)
    held_out = snapshots.manifests(store, snapshot.repository, snapshot.commit, "held_out")
    rollout.install_draft(store, config.drafts_repository, "main", digest, cache_folder("drafts"))
    scores: list[RequestScore] = []
    reasons: list[str] = []
    for split in (Split.GATE, Split.SELECTION):
        chosen = [
            pair
            for pair in snapshots.choose_held_out(held_out, split, config.policy().gate_requests)
            if any(r.request in requests and split_of(r.conversation) is split for r in pair[1].requests)
        ]
        if not chosen:
            continue
        shards = snapshots.fetch(store, snapshot.repository, snapshot.commit, chosen, cache_folder("held_out"))
        try:
            walked = wiring.evaluator().evaluate(
                cache_folder("drafts") / digest,
                shards,
                bundle=config.bundle,
                split=split,
                states_commit=snapshot.commit,
                **drafting(),
            )
        except EvaluationError as error:
            reasons.append(f"engine unchecked on {split}: {error}")
        else:
            scores += walked.scores
    return scores, reasons
