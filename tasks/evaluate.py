"""Evaluate: candidate and incumbent walked over the same gate requests, and the verdict on the difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.serve import serving_steps
from tasks.stage import cache_folder, stage
from tide import ledger, lineage, promotion, rollout, wiring
from tide.acceptance import baseline_without_draft
from tide.domain import DraftModel, EvalReport, Serving, Snapshot, Split, Verdict
from tide.serving_file import SIGNED_VERDICT, candidate_on, draft_prefix


@stage("fetch candidate")
def fetch_candidate(branch: str) -> DraftModel:
    """The record of the candidate on a branch, and its files in the local cache."""
    config = wiring.settings()
    store = wiring.store(config)
    digest = candidate_on(store, config.drafts_repository, branch)
    rollout.install_draft(store, config.drafts_repository, branch, digest, cache_folder("drafts"))
    return rollout.read_draft(store, config.drafts_repository, branch, digest)


@stage("fetch incumbent")
def fetch_incumbent() -> Serving:
    """What serves now, its draft in the local cache. Its generation is the one the verdict will be valid for."""
    config = wiring.settings()
    store = wiring.store(config)
    serving = rollout.read_serving(store, config.drafts_repository)
    if serving.stable:
        digest = serving.stable.digest
        rollout.install_draft(store, config.drafts_repository, "main", digest, cache_folder("drafts"))
    return serving


@stage("walk draft")
def walk_draft(digest: str, shards: Sequence[Path], snapshot: Snapshot) -> EvalReport:
    """Acceptance of one draft on the gate split, at the steps that serve."""
    config = wiring.settings()
    return wiring.evaluator().evaluate(
        cache_folder("drafts") / digest,
        shards,
        bundle=config.bundle,
        split=Split.GATE,
        steps=serving_steps(),
        states_commit=snapshot.commit,
    )


@stage("decide promotion")
def decide_promotion(branch: str, candidate: EvalReport, incumbent: EvalReport | None, snapshot: Snapshot) -> Verdict:
    """The promotion gate; its verdict is signed and recorded beside the candidate whatever it says."""
    config = wiring.settings()
    policy, store, key = config.policy(), wiring.store(config), wiring.signing_key(config)
    verdict = promotion.decide(
        candidate,
        incumbent or baseline_without_draft(candidate),
        policy.promotion,
        attempt=1,
        states_commit=snapshot.commit,
        policy_digest=policy.digest(),
    )
    prefix, signed = draft_prefix(verdict.candidate), key.sign("verdict", verdict)
    for name, record in (("evaluation.json", candidate), ("verdict.json", verdict), (SIGNED_VERDICT, signed)):
        store.put(config.drafts_repository, branch, prefix + name, record.to_json().encode())
    if incumbent:
        store.put(config.drafts_repository, branch, prefix + "incumbent.json", incumbent.to_json().encode())
    message = f"verdict {verdict.outcome} on {verdict.candidate[:12]}"
    store.commit(config.drafts_repository, branch, message, lineage.verdict_record(verdict).to_metadata())
    ledger.append(store, config.drafts_repository, "verdict", verdict, signed=signed)
    publish_verdict(verdict)
    return verdict


def publish_verdict(verdict: Verdict) -> None:
    """Prefect artifacts: the verdict to read, and the acceptance table."""
    create_markdown_artifact(key="verdict", markdown=promotion.to_markdown(verdict), description=verdict.outcome)
    rows: list[dict[str, Any]] = [
        {
            "slice": s.slice,
            "requests": s.requests,
            "candidate": round(s.candidate, 3),
            "incumbent": round(s.incumbent, 3),
            "difference": round(s.difference.estimate, 3),
            "low": round(s.difference.low, 3),
            "high": round(s.difference.high, 3),
        }
        for s in (verdict.overall, *verdict.slices)
    ]
    create_table_artifact(key="acceptance", table=rows, description="acceptance length by slice")
