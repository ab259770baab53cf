"""Changing what serves, as steps over ports: try on one replica, change ``serving.json``, then the others; or restore.

Owns the order of a promotion, and that one which died at any point is finished by the next run. Prefect is not needed,
so that all of it works with Prefect down. Knows nothing of why a draft is better. How it is tried, what is seen
meanwhile and what a trial's end leaves is in tide.canary; the way back in ``rollback``; what makes replicas match in
``reconcile``.
"""

from __future__ import annotations

from tide.canary import leftovers as trial_leftovers
from tide.canary import trial
from tide.canary.trial import Trial
from tide.domain import CanaryRefusal, Promotion, Serving, ServingDraft, Verdict
from tide.errors import Conflict, StoreError, TideError
from tide.serving.reconcile import finish, reconcile
from tide.serving.replicas import DRAFT_FILES, NO_DRAFT, Restart, install_draft, mark_serving
from tide.serving.rollback import go_back, rollback
from tide.serving.serving_file import (
    candidate_on,
    change_serving,
    draft_prefix,
    read_draft,
    read_serving,
    read_signed_verdict,
)
from tide.serving.site import Site
from tide.signatures.attestation import Authority, check_verdict

__all__ = [
    "DRAFT_FILES",
    "NO_DRAFT",
    "Restart",
    "Site",
    "draft_prefix",
    "install_draft",
    "promote",
    "read_draft",
    "read_serving",
    "reconcile",
    "resume",
    "rollback",
]


def promote(
    site: Site, authority: Authority, *, candidate_ref: str, digest: str, expected_generation: int
) -> Promotion | CanaryRefusal:
    """Make a candidate with a signed verdict the draft in serving, everywhere or nowhere.

    Args:
        candidate_ref: branch or tag that holds ``drafts/<digest>/`` and its signed verdict.
        expected_generation: generation the verdict was made against; another one means that it is stale.

    Returns:
        What was promoted; or why the canary refused it, the incumbent serving again. The same verdict is refused again
        by the same record.

    Raises:
        SignatureRefused: the verdict is missing, forged, about another draft, or no ``promote``.
        Conflict: the incumbent changed meanwhile: evaluate again.
        CanaryBusy: another canary is under way: wait for its end.
        EngineUnavailable: no replica answers, or one does not and policy says ``stop``; nothing was changed.
    """
    signed = read_signed_verdict(site.store, site.repository, candidate_ref, digest)
    verdict = check_verdict(signed, digest, authority.trusted)
    before = read_serving(site.store, site.repository)
    if _done_before(before, digest, verdict, expected_generation):
        return finish(site, authority, before)
    _require_current(site.repository, before, verdict, expected_generation)
    if refusal := trial_leftovers.refused_before(site, before, verdict.digest()):
        return refusal
    before = trial_leftovers.take_over(site, authority, before, digest, verdict.digest())
    install_draft(site.store, site.repository, candidate_ref, digest, site.draft_dir)
    on_trial = trial.begin(site, authority, before, ServingDraft(digest=digest, verdict=verdict.digest()), signed)
    return _carry_out(site, authority, on_trial, candidate_ref)


def resume(site: Site, authority: Authority, candidate_ref: str) -> Promotion | CanaryRefusal:
    """Carry out the promotion of a candidate that has its verdict, or what a killed run left of it.

    The verdict names the incumbent, so that the generation need not be known.

    Raises:
        SignatureRefused, Conflict, EngineUnavailable: as `promote`.
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


def _carry_out(site: Site, authority: Authority, on_trial: Trial, candidate_ref: str) -> Promotion | CanaryRefusal:
    """From the lease to the last replica."""
    try:
        seen = on_trial.run()
        if isinstance(seen, CanaryRefusal):
            return seen
        promotion, signed = on_trial.promotion(*seen)
        after = Serving(generation=promotion.generation, stable=on_trial.draft, previous=on_trial.held.stable)
        change_serving(site.store, site.repository, candidate_ref, on_trial.held, after, promotion, signed)
    except StoreError:
        _step_back(site, authority, on_trial)
        raise
    mark_serving(site.draft_dir, promotion.draft, signed)
    if on_trial.incumbent is None:
        return promotion
    try:
        others = on_trial.bring_others()
    except TideError as error:
        return _undo(site, authority, on_trial, after, error)
    return promotion.model_copy(update={"replicas": promotion.replicas + tuple(others)})


def _undo(site: Site, authority: Authority, on_trial: Trial, after: Serving, error: TideError) -> CanaryRefusal:
    """A replica failed after the canary: the incumbent comes back, as a generation of its own."""
    assert after.previous is not None
    back = go_back(site, authority, after, after.previous, tolerant=True)
    reason = f"{error}; generation {back.generation} is the incumbent again"
    return trial.refuse(site, authority, on_trial.held, trial.failed(reason), back.replicas)


def _step_back(site: Site, authority: Authority, on_trial: Trial) -> None:
    """The record could not be merged: serve what ``serving.json`` says, which may be a faster promotion's draft."""
    try:
        now = read_serving(site.store, site.repository)
        if now != on_trial.held and now.stable is not None:
            reconcile(site, authority)
            return
    except TideError:
        pass  # the store is what failed, most likely: go back to what served before
    on_trial.restore()


def _done_before(serving: Serving, digest: str, verdict: Verdict, expected_generation: int) -> bool:
    """True when an earlier, killed run of the same promotion got as far as its merge."""
    wanted = ServingDraft(digest=digest, verdict=verdict.digest())
    return serving.generation == expected_generation + 1 and serving.stable == wanted


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
