"""Lineage: what stands in commit metadata, so that it is as durable as the data it describes.

Owns which facts are recorded for each kind of thing, and nothing else writes commit metadata. Pure: values in, records
out. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide.domain import (
    ApprovalSettlement,
    CanaryLease,
    CanaryReport,
    DraftModel,
    DriftReport,
    LineageRecord,
    PoolChoice,
    Promotion,
    Verdict,
    WindowManifest,
)


def states_record(manifest: WindowManifest) -> LineageRecord:
    """What stands in the metadata of a window's commit: windows, engine, target and the drafts that served."""
    target = manifest.target
    return LineageRecord(
        kind="states",
        subject=f"{manifest.window}/{manifest.replica}",
        parents={},
        facts={
            "windows": manifest.window,
            "replica": manifest.replica,
            "engine": ",".join(manifest.engines),
            "target_contract": target.digest() if target else "",
            "target": target.to_json() if target else "",
            "drafts": ",".join(manifest.drafts),
            "shards": str(len(manifest.shards)),
            "rows": str(manifest.rows),
            "requests": str(manifest.requests),
        },
    )


def candidate_record(draft: DraftModel, drift: DriftReport | None) -> LineageRecord:
    """A trained draft: from which states, which parent, under which policy and environment."""
    parents = {"states": f"{draft.states_repository}@{draft.states_commit}" if draft.states_commit else "imported"}
    if draft.parent:
        parents["draft"] = draft.parent
    facts = {
        "policy": draft.policy or "",
        "seed": str(draft.seed),
        "steps": str(draft.steps),
        "trained_tokens": str(draft.trained_tokens),
        "target_contract": draft.target.digest(),
        "cause": (drift.cause or "forced") if drift else "forced",
    }
    facts |= {f"environment.{k}": v for k, v in draft.environment.items()}
    return LineageRecord(kind="candidate", subject=draft.digest, parents=parents, facts=facts)


def pooled_record(choice: PoolChoice) -> LineageRecord:
    """A draft that served before, proposed again: nothing was made, so it is no second ``candidate`` record of it."""
    assert choice.chosen is not None
    assert choice.incumbent_length is not None
    facts = {
        "acceptance_length": f"{choice.lengths[choice.chosen]:.4f}",
        "incumbent_acceptance_length": f"{choice.incumbent_length:.4f}",
        "requests": str(choice.requests),
        "pool": str(len(choice.lengths)),
    }
    parents = {"incumbent": choice.incumbent, "states": choice.states_commit}
    return LineageRecord(kind="pooled", subject=choice.chosen, parents=parents, facts=facts)


def verdict_record(verdict: Verdict) -> LineageRecord:
    """A gate decision: on which states, between which drafts, with which statistics."""
    return LineageRecord(
        kind="verdict",
        subject=verdict.digest(),
        parents={"candidate": verdict.candidate, "incumbent": verdict.incumbent, "states": verdict.states_commit},
        facts={
            "outcome": verdict.outcome,
            "acceptance_length": f"{verdict.overall.candidate:.4f}",
            "incumbent_acceptance_length": f"{verdict.overall.incumbent:.4f}",
            "difference": f"{verdict.overall.difference.estimate:.4f}",
            "difference_low": f"{verdict.overall.difference.low:.4f}",
            "requests": str(verdict.overall.requests),
            "alpha": f"{verdict.alpha:.5f}",
            "policy": verdict.policy,
            "definition": verdict.definition,
        },
    )


def approved_record(verdict: Verdict, approval: ApprovalSettlement) -> LineageRecord:
    """The verdict's record again, with who approved it: the newest record of a verdict is the one that counts."""
    record = verdict_record(verdict)
    facts = {"approval": approval.digest(), "approved_by": ",".join(approval.approved_by)}
    return record.model_copy(update={"facts": {**record.facts, **facts}})


def promotion_record(promotion: Promotion) -> LineageRecord:
    """A change of what serves: which draft replaced which, on whose verdict, on which replicas."""
    parents = {"draft": promotion.draft}
    if promotion.previous:
        parents["previous"] = promotion.previous
    if promotion.verdict:
        parents["verdict"] = promotion.verdict
    replicas = ",".join(r.replica for r in promotion.replicas if not r.out_of_service)
    facts = {"generation": str(promotion.generation), "replicas": replicas}
    return LineageRecord(kind=promotion.kind, subject=promotion.draft, parents=parents, facts=facts)


def canary_record(lease: CanaryLease, generation: int) -> LineageRecord:
    """A candidate tried on some replicas, for the generation that would follow; what serves is unchanged."""
    facts = {"generation": str(generation), "replicas": ",".join(lease.replicas), "run": lease.run}
    return LineageRecord(kind="canary", subject=lease.draft, parents={"verdict": lease.verdict}, facts=facts)


def release_record(lease: CanaryLease, generation: int, report: CanaryReport) -> LineageRecord:
    """A canary that ended with the incumbent. The record with its figures is in the ledger."""
    facts = {"generation": str(generation), "outcome": report.outcome, "reason": "; ".join(report.reasons)[:500]}
    return LineageRecord(kind="release", subject=lease.draft, parents={"verdict": lease.verdict}, facts=facts)


def guard_record(action: str) -> LineageRecord:
    """A change of the hook that guards the drafts repository's main; the subject is the digest of its file."""
    return LineageRecord(kind="guard", subject=action)


def erasure_record(id: str, requests: int, windows: Sequence[str]) -> LineageRecord:
    """Windows written again without some requests. The record itself, with the hashed ids, is in the ledger."""
    facts = {"requests": str(requests), "windows": ",".join(windows)}
    return LineageRecord(kind="erasure", subject=id, parents={}, facts=facts)


def retention_record(windows: Sequence[str], size: int, policy: str) -> LineageRecord:
    """Windows that left main, and by which policy."""
    facts = {"windows": ",".join(windows), "bytes": str(size), "policy": policy}
    return LineageRecord(kind="retention", subject=f"{windows[0]}..{windows[-1]}", parents={}, facts=facts)
