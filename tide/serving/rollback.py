"""Going back to a draft that was promoted before, as a new generation.

Owns the order of a rollback: it is never stopped by a replica that does not answer, since the draft in serving may be
what took it down. Works over the ports. Knows nothing of canaries: what served before needs no trial.
"""

from __future__ import annotations

import re

from tide.domain import Attestation, Promotion, ReplicaSwap, Serving, ServingDraft, Signed
from tide.errors import BadInputError, Conflict, EngineUnavailable, NotFound, StoreError, TideError
from tide.repositories import MAIN
from tide.serving.reconcile import finish, reconcile
from tide.serving.replicas import allow, bring_back, bring_or_name, install_draft, mark_serving, out_of_service
from tide.serving.serving_file import change_serving, read_promotion, read_promotions, read_serving
from tide.serving.site import Site
from tide.signatures.attestation import Authority

_GENERATION = re.compile(r"gen-0*(\d+)(?:-[0-9a-f]+)?")
SHORTEST = 6
"""Characters of a digest that may stand for it."""


def rollback(
    site: Site, authority: Authority, *, expected_generation: int | None = None, to: str | None = None
) -> Promotion:
    """Put a draft that was promoted before back into serving, as a new generation, by a signed record of its own.

    A canary that is under way loses its lease, and ends. A replica that does not answer is named in the record.

    Args:
        expected_generation: the one to leave. With it, a second call, or one after a crash, does not go back again.
        to: ``gen-N``, or a promoted draft's digest or its beginning; the previous draft when None.

    Raises:
        NotFound: nothing was in serving before, or no such draft was promoted.
        BadInputError: it serves already, or the name stands for none or several drafts.
        Conflict: another generation than the expected one serves, or another change was faster.
        EngineError: a replica refused it; what serves is unchanged.
    """
    before = read_serving(site.store, site.repository)
    if expected_generation is not None and before.generation != expected_generation:
        return _went_back(site, authority, before, expected_generation)
    draft = _target(site, before, to)
    install_draft(site.store, site.repository, MAIN, draft.digest, site.draft_dir)
    return go_back(site, authority, before, draft)


def go_back(
    site: Site, authority: Authority, before: Serving, draft: ServingDraft, *, tolerant: bool = False
) -> Promotion:
    """One replica is seen to serve it, ``serving.json`` says so, then the others follow.

    Args:
        before: what ``serving.json`` says.
        tolerant: change it whatever a replica does: the draft in serving must not stay.
    """
    signed = authority.attest(_statement(site, before, draft))
    allow(site.draft_dir, draft.digest, signed)
    swaps = _first(site, draft.digest, before, tolerant)
    promotion = Promotion(
        kind="rollback",
        generation=before.generation + 1,
        draft=draft.digest,
        previous=before.stable.digest if before.stable else None,
        verdict=draft.verdict,
        replicas=tuple(swaps),
        at=site.clock(),
    )
    _merge(site, authority, before, draft, promotion, signed)
    mark_serving(site.draft_dir, draft.digest, signed)
    done = {swap.replica for swap in swaps}
    rest = [bring_or_name(site.bringer, r, draft.digest) for r in site.replicas if r.name not in done]
    return promotion.model_copy(update={"replicas": (*swaps, *rest)})


def find_promoted(site: Site, name: str) -> ServingDraft:
    """A promoted draft by ``gen-N``, its digest, or the beginning of that.

    Raises:
        NotFound: no such draft was promoted.
        BadInputError: no such name, or several drafts begin so.
    """
    promotions = read_promotions(site.store, site.repository)
    if found := _GENERATION.fullmatch(name):
        drafts = {p.draft: p for p in promotions if p.generation == int(found[1])}
    elif len(name) >= SHORTEST and re.fullmatch("[0-9a-f]+", name):
        drafts = {p.draft: p for p in promotions if p.draft.startswith(name)}
    else:
        raise BadInputError(f"{name!r} is no draft: give gen-N or {SHORTEST} or more digits of its digest")
    if not drafts:
        raise NotFound(f"{site.repository}: {name} was never in serving; `tide history` shows what was")
    if len(drafts) > 1:
        raise BadInputError(f"{name} stands for {', '.join(d[:16] for d in sorted(drafts))}: give more digits")
    ((digest, promotion),) = drafts.items()
    return ServingDraft(digest=digest, verdict=promotion.verdict)


def _target(site: Site, before: Serving, to: str | None) -> ServingDraft:
    if to is not None:
        draft = find_promoted(site, to)
    elif before.previous is not None:
        draft = before.previous
    else:
        raise NotFound(f"{site.repository}: generation {before.generation} has no previous draft to go back to")
    if before.stable is not None and draft.digest == before.stable.digest:
        raise BadInputError(
            f"{site.repository}: draft {draft.digest[:12]} serves already; `tide reconcile` brings replicas to it"
        )
    return draft


def _went_back(site: Site, authority: Authority, before: Serving, expected_generation: int) -> Promotion:
    """What an earlier call of the same rollback did."""
    if before.generation == expected_generation + 1:
        last = read_promotion(site.store, site.repository, before.generation)
        if last.kind == "rollback":
            return finish(site, authority, before)
    raise Conflict(
        f"{site.repository}: generation {before.generation} serves, not {expected_generation}; see `tide history`"
    )


def _first(site: Site, digest: str, before: Serving, tolerant: bool) -> list[ReplicaSwap]:
    """The replicas up to the first that serves it; those before it did not answer."""
    done: list[ReplicaSwap] = []
    for replica in site.replicas:
        try:
            return [*done, site.bringer.bring(replica, digest)]
        except EngineUnavailable as error:
            done.append(out_of_service(replica, error))
        except TideError as error:
            done.append(out_of_service(replica, error))
            if not tolerant:
                incumbent = before.stable.digest if before.stable else None
                bring_back(site.bringer, site.replicas, {replica.name: str(incumbent)}, incumbent)
                raise
    return done


def _merge(
    site: Site, authority: Authority, before: Serving, draft: ServingDraft, promotion: Promotion, signed: Signed
) -> None:
    after = Serving(generation=promotion.generation, stable=draft, previous=before.stable)
    try:
        change_serving(site.store, site.repository, MAIN, before, after, promotion, signed)
    except StoreError:
        try:
            reconcile(site, authority)  # what serving.json says, which may be a faster change's draft
        except TideError:
            touched = {s.replica: s.before for s in promotion.replicas if not s.out_of_service}
            bring_back(site.bringer, site.replicas, touched, promotion.previous)
        raise


def _statement(site: Site, before: Serving, draft: ServingDraft) -> Attestation:
    return Attestation(
        kind="rollback",
        generation=before.generation + 1,
        draft=draft.digest,
        previous=before.stable.digest if before.stable else None,
        verdict=None,
        at=site.clock(),
    )
