"""Evaluate: candidate and incumbent walked over the same gate requests, and the verdict on the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.serve import drafting
from tasks.stage import cache_folder, stage
from tasks.throughput import load_of, profile_for
from tide import wiring
from tide.acceptance import NO_DRAFT, baseline_without_draft
from tide.domain import (
    DraftModel,
    EvalReport,
    GateGeneration,
    Serving,
    Signed,
    Snapshot,
    Split,
    Verdict,
)
from tide.lineage import ledger
from tide.lineage import metadata as lineage
from tide.promotion import families, gate, verdict_report, verdict_text
from tide.promotion import rule as promotion
from tide.serving import rollout
from tide.serving.serving_file import SIGNED_VERDICT, candidate_on, draft_prefix
from tide.states import snapshots


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


@stage("fetch gate")
def fetch_gate(snapshot: Snapshot, candidate: str, serving: Serving) -> tuple[GateGeneration, tuple[Path, ...]]:
    """The gate generation that the next verdict is made on, and local copies of the shards that hold it."""
    config = wiring.settings()
    policy, store = config.policy(), wiring.store(config)
    generation, chosen = gate.choose(
        snapshots.manifests(store, snapshot.repository, snapshot.commit, "held_out"),
        _verdicts(),
        candidate=candidate,
        incumbent=serving.stable.digest if serving.stable else NO_DRAFT,
        requests=policy.gate_requests,
        max_verdicts=policy.promotion.max_verdicts,
    )
    folder = cache_folder("held_out")
    return generation, tuple(snapshots.fetch(store, snapshot.repository, snapshot.commit, chosen, folder))


@stage("walk draft")
def walk_draft(digest: str, shards: Sequence[Path], snapshot: Snapshot) -> EvalReport:
    """Acceptance of one draft on the gate split, drafted as serving does."""
    config = wiring.settings()
    return wiring.evaluator().evaluate(
        cache_folder("drafts") / digest,
        shards,
        bundle=config.bundle,
        split=Split.GATE,
        states_commit=snapshot.commit,
        **drafting(),
    )


@stage("decide promotion")
def decide_promotion(
    branch: str,
    candidate: EvalReport,
    incumbent: EvalReport | None,
    snapshot: Snapshot,
    generation: GateGeneration | None = None,
) -> Verdict:
    """The promotion gate; its verdict is signed and recorded beside the candidate whatever it says."""
    config, theirs = wiring.settings(), incumbent or baseline_without_draft(candidate)
    verdict = _decide(candidate, theirs, snapshot, generation)
    page = verdict_report.render(verdict, candidate, theirs, config.policy().promotion).encode()
    _record(
        branch, verdict, page, {"evaluation.json": candidate} | ({"incumbent.json": incumbent} if incumbent else {})
    )
    publish_verdict(verdict)
    return verdict


def _decide(
    candidate: EvalReport, incumbent: EvalReport, snapshot: Snapshot, generation: GateGeneration | None
) -> Verdict:
    policy, given = wiring.settings().policy(), _verdicts()
    attempt = 1
    if generation is not None:
        generation = generation.model_copy(update={"used": families.uses_of(given, generation.id)})
        attempt = families.attempt_of(given, families.family_of(generation.id, incumbent.draft))
    profile = profile_for(candidate.target, steps=candidate.steps)
    return promotion.decide(
        candidate,
        incumbent,
        policy.promotion,
        attempt=attempt,
        states_commit=snapshot.commit,
        policy_digest=policy.digest(),
        gate=generation,
        profile=profile,
        concurrency=load_of(snapshot).concurrency if profile else None,
    )


def _verdicts() -> list[Verdict]:
    """Every verdict of the ledger, oldest first."""
    config = wiring.settings()
    return ledger.every(wiring.store(config), config.drafts_repository, "verdict", Verdict)


def _record(branch: str, verdict: Verdict, page: bytes, reports: Mapping[str, EvalReport]) -> None:
    """Put the verdict, signed, with its page and the reports beside the candidate, and into the ledger."""
    config = wiring.settings()
    store, repository, signed = wiring.store(config), config.drafts_repository, _signed(verdict)
    prefix = draft_prefix(verdict.candidate)
    for name, record in {**reports, "verdict.json": verdict, SIGNED_VERDICT: signed}.items():
        store.put(repository, branch, prefix + name, record.to_json().encode())
    store.put(repository, branch, f"{prefix}verdict{verdict_report.SUFFIX}", page)
    message = f"verdict {verdict.outcome} on {verdict.candidate[:12]}"
    store.commit(repository, branch, message, lineage.verdict_record(verdict).to_metadata())
    ledger.append(store, repository, "verdict", verdict, signed=signed, attachments={verdict_report.SUFFIX: page})


def _signed(verdict: Verdict) -> Signed:
    return wiring.signing_key(wiring.settings()).sign("verdict", verdict)


def publish_verdict(verdict: Verdict) -> None:
    """Prefect artifacts: the verdict to read, and the acceptance table."""
    create_markdown_artifact(key="verdict", markdown=verdict_text.to_markdown(verdict), description=verdict.outcome)
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
