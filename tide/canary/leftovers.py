"""What a promoter that died, or is slow, left of a trial: gone on with, ended, or left alone.

Owns who may end whose canary, and when. Works over the ports. Knows nothing of how a trial goes.
"""

from __future__ import annotations

import time

from tide.canary import lease as canary_lease
from tide.canary.trial import LEDGER, failed, refuse
from tide.domain import CanaryRefusal, ReplicaSwap, Serving
from tide.errors import CanaryBusy
from tide.lineage import ledger
from tide.serving import promoter
from tide.serving.replicas import bring_back
from tide.serving.serving_file import read_serving
from tide.serving.site import Site
from tide.signatures.attestation import Authority
from tide.signatures.signing import TrustedKeys


def take_over(site: Site, authority: Authority, before: Serving, digest: str, verdict: str) -> Serving:
    """What ``serving.json`` says once this promotion may begin, or go on.

    A lease of this very promotion, left by a process that died, is gone on with; any other that is over, or whose
    promoter died on this host, is ended with the incumbent.

    Raises:
        CanaryBusy: another canary is under way.
    """
    lease = before.canary
    if lease is None:
        return before
    dead, left = promoter.has_died(lease.run), lease.lease_until - site.clock()
    same = (lease.draft, lease.verdict) == (digest, verdict) and (lease.run == site.run or dead)
    if same and left > site.policy.wait_s:
        return before
    if not (same or dead or left <= 0):
        until = time.strftime("%H:%M:%S UTC", time.gmtime(lease.lease_until))
        raise CanaryBusy(
            f"{site.repository}: draft {lease.draft[:12]} is on trial on {', '.join(lease.replicas)} by {lease.run} "
            f"until {until}: wait for its end"
        )
    _end(site, authority, before)
    return read_serving(site.store, site.repository)


def refused_before(site: Site, before: Serving, verdict: str) -> CanaryRefusal | None:
    """The refusal that this verdict has already: its canary is not tried again until chance lets it pass.

    One that failed for a replica's sake may be tried again, unless its promoter only died before giving the lease back.
    """
    for refusal in ledger.every(site.store, site.repository, LEDGER, CanaryRefusal):
        unfinished = refusal.lease == before.canary
        if refusal.lease.verdict == verdict and (unfinished or refusal.report.outcome != "failed"):
            if unfinished:
                _back(site, before)
                canary_lease.release(site.store, site.repository, before, refusal.report)
            return refusal
    return None


def end_expired(site: Site, authority: Authority | TrustedKeys, serving: Serving) -> tuple[ReplicaSwap, ...]:
    """End a canary whose lease is over, with the incumbent; the swaps that it took."""
    if serving.canary is None or site.clock() < serving.canary.lease_until:
        return ()
    return _end(site, authority, serving).replicas


def on_trial(serving: Serving, now: float) -> frozenset[str]:
    """Names of the replicas that others leave alone."""
    live = serving.canary is not None and now < serving.canary.lease_until
    return frozenset(serving.canary.replicas) if live and serving.canary else frozenset()


def _end(site: Site, authority: Authority | TrustedKeys, serving: Serving) -> CanaryRefusal:
    assert serving.canary is not None
    reason = f"its promoter {serving.canary.run} ended, or took longer than its lease, without a decision"
    return refuse(site, authority, serving, failed(reason), _back(site, serving))


def _back(site: Site, serving: Serving) -> list[ReplicaSwap]:
    """The incumbent on the replicas of a lease; before the first promotion nobody knows what served."""
    incumbent = serving.stable.digest if serving.stable else None
    tried = serving.canary.replicas if serving.canary and incumbent else ()
    return bring_back(site.bringer, site.replicas, {name: str(incumbent) for name in tried}, incumbent)
