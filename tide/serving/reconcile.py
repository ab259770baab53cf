"""Making replicas match ``serving.json``, and finishing what a killed rollout left.

Owns that no replica is touched unless what serves is attested, that a canary under way is left alone, and that a
replica which cannot be reached is named. Works over the ports.
"""

from __future__ import annotations

from dataclasses import replace

from tide.canary import leftovers as trial_leftovers
from tide.domain import Promotion, ReplicaSwap, Serving
from tide.engine.base import Engine
from tide.errors import EngineError
from tide.repositories import MAIN
from tide.serving.replicas import bring_or_name, install_draft, mark_serving, out_of_service
from tide.serving.serving_file import read_attestation, read_promotion, read_serving, tidy_up
from tide.serving.site import Site
from tide.signatures.attestation import Authority
from tide.signatures.signing import TrustedKeys


def reconcile(site: Site, authority: Authority | TrustedKeys) -> list[ReplicaSwap]:
    """Make every replica match ``serving.json``; returns the swaps that were needed, and who is out of service.

    The replicas of a canary under way are left alone; one whose lease is over ends with the incumbent.

    Args:
        authority: with a key, the end of a canary is signed in the ledger; without, it is recorded unsigned.

    Raises:
        SignatureRefused: what ``serving.json`` says is not attested: no replica was touched.
    """
    trusted = authority.trusted if isinstance(authority, Authority) else authority
    serving = read_serving(site.store, site.repository)
    if serving.stable is None:
        return list(trial_leftovers.end_expired(site, authority, serving))
    signed, _ = read_attestation(site.store, site.repository, trusted)
    digest, tried = serving.stable.digest, trial_leftovers.on_trial(serving, site.clock())
    install_draft(site.store, site.repository, MAIN, digest, site.draft_dir)
    mark_serving(site.draft_dir, digest, signed)
    ended = trial_leftovers.end_expired(site, authority, serving)
    done = tried | {swap.replica for swap in ended}
    found = (_matched(site, replica, digest) for replica in site.replicas if replica.name not in done)
    return [*(swap for swap in ended if swap.before != swap.after or swap.out_of_service), *filter(None, found)]


def finish(site: Site, authority: Authority, serving: Serving) -> Promotion:
    """Do what is left of a rollout whose record was merged; its record, with what the replicas did by now."""
    tidy_up(site.store, site.repository, serving)
    later = {swap.replica: swap for swap in reconcile(site, authority)}
    promotion = read_promotion(site.store, site.repository, serving.generation)
    kept = (swap for swap in promotion.replicas if swap.replica not in later)
    return promotion.model_copy(update={"replicas": (*kept, *later.values())})


def _matched(site: Site, replica: Engine, digest: str) -> ReplicaSwap | None:
    """What it took to bring a replica to the draft; None when it serves it."""
    try:
        if replica.active_draft() == digest:
            return None
    except EngineError as error:
        return out_of_service(replica, error)
    return bring_or_name(replace(site.bringer, restart=None), replica, digest)
