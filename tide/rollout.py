"""Changing what serves, as steps over ports: install the draft, swap each replica, change ``serving.json``, or restore.

Owns the order of a promotion and what happens when a step fails or the process dies: run again with the same generation
it goes on where it was. Prefect is not needed, so that a rollback works with it down. Knows nothing of why a draft is
better.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tide.attestation import Authority, check_verdict
from tide.domain import Attestation, Promotion, ReplicaSwap, Serving, ServingDraft, Signed, Verdict
from tide.engine.base import Engine
from tide.errors import Conflict, NotFound, StoreError, TideError
from tide.replicas import DRAFT_FILES, NO_DRAFT, Restart, install_draft, mark_serving, restore, swap_all, swap_one
from tide.repositories import MAIN
from tide.serving_file import (
    candidate_on,
    change_serving,
    draft_prefix,
    read_attestation,
    read_draft,
    read_promotion,
    read_serving,
    read_signed_verdict,
    tidy_up,
)
from tide.signing import TrustedKeys
from tide.store.base import Store

__all__ = ["DRAFT_FILES", "NO_DRAFT", "Restart", "draft_prefix", "install_draft", "read_draft", "read_serving"]


@dataclass(frozen=True)
class Site:
    """Where a rollout happens."""

    store: Store
    repository: str
    """The drafts repository."""
    replicas: Sequence[Engine]
    draft_dir: Path
    """DRAFT_DIR of the replicas on this host."""
    restart: Restart | None = None


def promote(
    site: Site, authority: Authority, *, candidate_ref: str, digest: str, expected_generation: int
) -> Promotion:
    """Make a candidate with a signed verdict the draft in serving, everywhere or nowhere.

    Args:
        candidate_ref: branch or tag that holds ``drafts/<digest>/`` and its signed verdict.
        expected_generation: generation the verdict was made against; another one means that it is stale.

    Raises:
        SignatureRefused: the verdict is missing, forged, about another draft, or no ``promote``.
        Conflict: the incumbent changed meanwhile; evaluate again.
        EngineError: a replica failed; the incumbent was restored on all that had changed.
    """
    signed = read_signed_verdict(site.store, site.repository, candidate_ref, digest)
    verdict = check_verdict(signed, digest, authority.trusted)
    before = read_serving(site.store, site.repository)
    if _done_before(before, digest, verdict, expected_generation):
        return _finish(site, authority, before)
    _require_current(site.repository, before, verdict, expected_generation)
    install_draft(site.store, site.repository, candidate_ref, digest, site.draft_dir)
    return _roll_out(
        site, authority, before, candidate_ref, ServingDraft(digest=digest, verdict=verdict.digest()), signed
    )


def resume(site: Site, authority: Authority, candidate_ref: str) -> Promotion:
    """Carry out the promotion of a candidate that has its verdict, or what a killed run left of it.

    The verdict names the incumbent, so that the generation need not be known.

    Raises:
        SignatureRefused, Conflict, EngineError: as `promote`.
        NotFound: the branch holds no candidate.
    """
    digest = candidate_on(site.store, site.repository, candidate_ref)
    verdict = check_verdict(
        read_signed_verdict(site.store, site.repository, candidate_ref, digest), digest, authority.trusted
    )
    serving = read_serving(site.store, site.repository)
    merged = _done_before(serving, digest, verdict, serving.generation - 1)
    expected = serving.generation - 1 if merged else serving.generation
    return promote(site, authority, candidate_ref=candidate_ref, digest=digest, expected_generation=expected)


def rollback(site: Site, authority: Authority, *, expected_generation: int | None = None) -> Promotion:
    """Put the previous draft back into serving, as a new generation, by a signed record of its own.

    Args:
        expected_generation: the one to leave. With it, a second call, or one after a crash, does not go back again.

    Raises:
        NotFound: nothing was in serving before.
        Conflict: another generation than the expected one serves.
    """
    before = read_serving(site.store, site.repository)
    if expected_generation is not None and before.generation != expected_generation:
        if before.generation == expected_generation + 1:
            last = read_promotion(site.store, site.repository, before.generation)
            if last.kind == "rollback":
                return _finish(site, authority, before)
        raise Conflict(
            f"{site.repository}: generation {before.generation} serves, not {expected_generation}; see `tide history`"
        )
    if before.previous is None:
        raise NotFound(f"{site.repository}: generation {before.generation} has no previous draft to go back to")
    install_draft(site.store, site.repository, MAIN, before.previous.digest, site.draft_dir)
    return _roll_out(site, authority, before, MAIN, before.previous, None)


def reconcile(site: Site, trusted: TrustedKeys) -> list[ReplicaSwap]:
    """Make every replica match ``serving.json``; returns the swaps that were needed.

    Raises:
        SignatureRefused: what ``serving.json`` says is not attested: no replica was touched.
    """
    serving = read_serving(site.store, site.repository)
    if serving.stable is None:
        return []
    signed, _ = read_attestation(site.store, site.repository, trusted)
    digest = serving.stable.digest
    install_draft(site.store, site.repository, MAIN, digest, site.draft_dir)
    mark_serving(site.draft_dir, digest, signed)
    return [swap_one(r, digest, None) for r in site.replicas if r.active_draft() != digest]


def _done_before(serving: Serving, digest: str, verdict: Verdict, expected_generation: int) -> bool:
    """True when an earlier, killed run of the same promotion got as far as its merge."""
    wanted = ServingDraft(digest=digest, verdict=verdict.digest())
    return serving.generation == expected_generation + 1 and serving.stable == wanted


def _finish(site: Site, authority: Authority, serving: Serving) -> Promotion:
    tidy_up(site.store, site.repository, serving)
    reconcile(site, authority.trusted)
    return read_promotion(site.store, site.repository, serving.generation)


def _require_current(repository: str, serving: Serving, verdict: Verdict, expected_generation: int) -> None:
    incumbent = serving.stable.digest if serving.stable else NO_DRAFT
    if serving.generation != expected_generation:
        raise Conflict(
            f"{repository}: serving is at generation {serving.generation}, the verdict was made against "
            f"{expected_generation}: evaluate the candidate again"
        )
    if verdict.incumbent != incumbent:
        raise Conflict(
            f"{repository}: {incumbent[:12]} serves, the verdict was made against {verdict.incumbent[:12]}: "
            "evaluate the candidate again"
        )


def _roll_out(
    site: Site, authority: Authority, before: Serving, source: str, draft: ServingDraft, verdict: Signed | None
) -> Promotion:
    """Swap every replica, then merge the new ``serving.json``; restore on failure."""
    kind: Literal["promotion", "rollback"] = "promotion" if verdict else "rollback"
    after = Serving(generation=before.generation + 1, stable=draft, previous=before.stable)
    previous = before.stable.digest if before.stable else None
    statement = Attestation(
        kind=kind, generation=after.generation, draft=draft.digest, previous=previous, verdict=verdict, at=time.time()
    )
    signed = authority.attest(statement)
    swaps = swap_all(site.replicas, site.draft_dir, site.restart, draft.digest, previous, signed)
    promotion = Promotion(
        kind=kind,
        generation=after.generation,
        draft=draft.digest,
        previous=previous,
        verdict=draft.verdict,
        replicas=tuple(swaps),
        at=time.time(),
    )
    try:
        change_serving(site.store, site.repository, source, after, promotion, signed)
    except StoreError:
        _step_back(site, authority, {swap.replica: swap.before for swap in swaps}, previous)
        raise
    return promotion


def _step_back(site: Site, authority: Authority, before: Mapping[str, str], incumbent: str | None) -> None:
    """The record could not be merged: serve what ``serving.json`` says, which may be a faster promotion's draft."""
    try:
        if reconcile(site, authority.trusted) or read_serving(site.store, site.repository).stable:
            return
    except TideError:
        pass  # the store is what failed, most likely: go back to what served before
    restore(site.replicas, site.draft_dir, before, incumbent)
