"""A key of the tests, verdicts signed with it, and what lets a draft serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tests.support.reports import TARGET
from tide.domain import Attestation, CanaryRefusal, Interval, Promotion, Signed, SliceVerdict, Verdict
from tide.lineage import metadata as lineage
from tide.serving.rollout import Site, promote
from tide.serving.serving_file import SIGNED_VERDICT, draft_prefix, read_serving
from tide.signatures.attestation import Authority, attestation_file
from tide.signatures.signing import SigningKey, TrustedKeys
from tide.store.base import Store

KEY, STRANGER = SigningKey.generate(), SigningKey.generate()
AUTHORITY = Authority(KEY, TrustedKeys([KEY.public]))


def verdict_on(
    candidate: str,
    incumbent: str = "none",
    outcome: Literal["promote", "reject", "inconclusive"] = "promote",
    states: str = "5" * 64,
) -> Verdict:
    """A verdict on 30 requests, +.34 [.21, .47]."""
    gain = Interval(estimate=0.34, low=0.21, high=0.47)
    overall = SliceVerdict(slice="overall", requests=30, candidate=1.72, incumbent=1.38, difference=gain)
    return Verdict(
        outcome=outcome,
        candidate=candidate,
        incumbent=incumbent,
        reasons=("for a test",),
        overall=overall,
        slices=(),
        alpha=0.04,
        states_commit=states,
        policy="f" * 64,
        target=TARGET,
    )


def put_verdict(
    store: Store, repository: str, branch: str, verdict: Verdict, *, key: SigningKey = KEY, forged: bool = False
) -> Signed:
    """Record a signed verdict beside its candidate, as the promotion gate does."""
    signed = key.sign("verdict", verdict)
    if forged:
        signed = signed.model_copy(update={"payload": signed.payload.replace('"reject"', '"promote"')})
    prefix = draft_prefix(verdict.candidate)
    store.put(repository, branch, f"{prefix}verdict.json", verdict.to_json().encode())
    store.put(repository, branch, prefix + SIGNED_VERDICT, signed.to_json().encode())
    store.commit(repository, branch, "verdict", lineage.verdict_record(verdict).to_metadata())
    return signed


def attestation(draft: str, verdict: Signed | None, **changes: Any) -> Attestation:
    """A statement by which a draft may serve as generation 1."""
    kind = "promotion" if verdict else "rollback"
    fields: dict[str, Any] = {"kind": kind, "generation": 1, "draft": draft, "previous": None, "at": 1.0}
    return Attestation(verdict=verdict, **{**fields, **changes})


def attest(folder: Path, draft: str, key: SigningKey = KEY) -> Path:
    """Let a draft of a draft folder serve; returns the file that does."""
    signed = key.sign("attestation", attestation(draft, KEY.sign("verdict", verdict_on(draft))))
    path = folder / attestation_file(draft)
    path.write_text(signed.to_json())
    return path


def judge_and_promote(
    store: Store, repository: str, where: Site, branch: str, digest: str, **options: Any
) -> Promotion | CanaryRefusal:
    """A candidate on its branch gets its verdict against what serves now, and is promoted."""
    serving = read_serving(store, repository)
    incumbent = serving.stable.digest if serving.stable else "none"
    put_verdict(store, repository, branch, verdict_on(digest, incumbent))
    expected = options.pop("expected_generation", serving.generation)
    return promote(where, AUTHORITY, candidate_ref=branch, digest=digest, expected_generation=expected)
