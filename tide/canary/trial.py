"""The trial of a candidate on one replica: its lease, what is seen, and the way back to the incumbent.

Owns how a trial begins, ends well or ends badly. Works over the ports. Knows nothing of the rest of a promotion; what a
promoter that died leaves of a trial is in ``leftovers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tide.canary import lease as canary_lease
from tide.domain import (
    Attestation,
    CanaryLease,
    CanaryRefusal,
    CanaryReport,
    Promotion,
    ReplicaSwap,
    Serving,
    ServingDraft,
    Signed,
)
from tide.engine.base import Engine
from tide.errors import CanaryBusy, Conflict, EngineUnavailable, StoreError, StoreUnavailable, TideError
from tide.lineage import ledger
from tide.serving.replicas import allow, bring_back, out_of_service
from tide.serving.serving_file import read_serving
from tide.serving.site import Site
from tide.signatures.attestation import Authority
from tide.signatures.signing import TrustedKeys

LEDGER: Final = "canary"
"""Kind of a refusal in the ledger."""


@dataclass(frozen=True)
class Trial:
    """A candidate with a lease for one replica."""

    site: Site
    authority: Authority
    held: Serving
    """What ``serving.json`` says while the lease is held."""
    draft: ServingDraft
    verdict: Signed
    first: Engine
    served: dict[str, str] = field(default_factory=dict)
    """What each replica that answered served before."""

    @property
    def incumbent(self) -> str | None:
        """Digest of what serves; None before the first promotion."""
        return self.held.stable.digest if self.held.stable else None

    def run(self) -> CanaryRefusal | tuple[CanaryReport, list[ReplicaSwap]]:
        """Try it: what was seen and the replicas that serve it by now; or the refusal, the incumbent restored.

        Raises:
            Conflict: the lease was lost.
            StoreError: the store failed; the replica still has the candidate.
        """
        try:
            allow(self.site.draft_dir, self.draft.digest, self._attested("canary"))
            swaps = [self.site.bringer.bring(self.first, self.draft.digest)]
            report = self._watched()
            # Without an incumbent there is no generation to go back to: all or none before the record is merged.
            if report.good and self.incumbent is None:
                swaps += self.bring_others()
        except StoreError:
            raise
        except TideError as error:
            report, swaps = failed(str(error)), []
        if report.good:
            return report, swaps
        back = self.restore()
        return refuse(self.site, self.authority, self.held, report, back)

    def restore(self) -> list[ReplicaSwap]:
        """The incumbent on every replica touched."""
        touched = self.served if self.incumbent is None else {self.first.name: self.incumbent}
        return bring_back(self.site.bringer, self.site.replicas, touched, self.incumbent)

    def bring_others(self) -> list[ReplicaSwap]:
        """The candidate on every other replica, one after another; one that does not answer is named, or ends it.

        Raises:
            EngineError: a replica refused, or does not serve it; or did not answer where policy says ``stop``.
        """
        done = []
        for replica in (r for r in self.site.replicas if r.name != self.first.name):
            try:
                done.append(self.site.bringer.bring(replica, self.draft.digest))
            except EngineUnavailable as error:
                if self.site.policy.unreachable == "stop":
                    raise
                done.append(out_of_service(replica, error))
        return done

    def promotion(self, report: CanaryReport, swaps: Sequence[ReplicaSwap]) -> tuple[Promotion, Signed]:
        """The record to merge, and the statement by which the draft may serve."""
        promotion = Promotion(
            kind="promotion",
            generation=self.held.generation + 1,
            draft=self.draft.digest,
            previous=self.incumbent,
            verdict=self.draft.verdict,
            replicas=tuple(swaps),
            at=self.site.clock(),
            canary=report,
        )
        return promotion, self._attested("promotion")

    def _watched(self) -> CanaryReport:
        if self.site.watch is None or self.site.policy.max_requests == 0:
            return CanaryReport(outcome="off", reasons=("policy asks for no watch",))
        return self.site.watch(
            self.first,
            candidate=self.draft.digest,
            incumbent=self.incumbent,
            since=self.site.clock(),
            still_ours=self._require_lease,
        )

    def _require_lease(self) -> None:
        try:
            found = read_serving(self.site.store, self.site.repository)
        except StoreUnavailable:
            return  # the merge at the end decides
        if found != self.held:
            raise Conflict(
                f"{self.site.repository}: the canary of {self.draft.digest[:12]} was ended by another change of "
                "serving.json: evaluate the candidate again"
            )

    def _attested(self, kind: str) -> Signed:
        return self.authority.attest(_statement(kind, self.held, self.draft.digest, self.verdict, self.site.clock()))


def begin(site: Site, authority: Authority, before: Serving, draft: ServingDraft, verdict: Signed) -> Trial:
    """Take the lease of the first replica that answers; one that is held already is gone on with.

    Raises:
        EngineUnavailable: no replica answers, or one does not and policy says ``stop``. Nothing was changed.
        CanaryBusy: another's canary runs, here or on a replica that is not among ours.
        Conflict, HookRefused: as ``lease.take``.
    """
    assert draft.verdict is not None
    served = _reachable(site)
    named = before.canary.replicas if before.canary else tuple(served)
    first = next((r for r in site.replicas if r.name in named), None)
    if first is None:
        raise CanaryBusy(f"the canary runs on {', '.join(named)}, which TIDE_REPLICAS does not name: wait for its end")
    held = before
    if before.canary is not None:
        canary_lease.tidy_up(site.store, site.repository, before)
    else:
        lease = CanaryLease(
            draft=draft.digest,
            verdict=draft.verdict,
            replicas=(first.name,),
            run=site.run,
            lease_until=round(site.clock() + site.policy.lease_s, 3),
        )
        statement = _statement("canary", before, draft.digest, verdict, site.clock())
        held = canary_lease.take(site.store, site.repository, before, lease, authority.attest(statement))
    return Trial(site, authority, held, draft, verdict, first, served)


def refuse(
    site: Site,
    authority: Authority | TrustedKeys,
    held: Serving,
    report: CanaryReport,
    replicas: Sequence[ReplicaSwap],
) -> CanaryRefusal:
    """Record why a canary ended with the incumbent, and give its lease back: in this order, so that no end is lost."""
    assert held.canary is not None
    refusal = CanaryRefusal(
        generation=held.generation + 1,
        previous=held.stable.digest if held.stable else None,
        lease=held.canary,
        report=report,
        replicas=tuple(replicas),
        at=site.clock(),
    )
    signed = authority.key.sign(LEDGER, refusal) if isinstance(authority, Authority) else None
    ledger.append(site.store, site.repository, LEDGER, refusal, signed=signed)
    canary_lease.release(site.store, site.repository, held, report)
    return refusal


def failed(reason: str) -> CanaryReport:
    """What a replica or a promoter did, not the draft."""
    return CanaryReport(outcome="failed", reasons=(reason,))


def _reachable(site: Site) -> dict[str, str]:
    """What each replica serves; those that do not answer are left out, where policy lets them."""
    served, failure = {}, None
    for replica in site.replicas:
        try:
            served[replica.name] = replica.active_draft()
        except EngineUnavailable as error:
            if site.policy.unreachable == "stop":
                raise
            failure = error
    if failure is not None and not served:
        raise failure
    return served


def _statement(kind: str, serving: Serving, draft: str, verdict: Signed, at: float) -> Attestation:
    fields = {"kind": kind, "generation": serving.generation + 1, "draft": draft, "verdict": verdict, "at": at}
    return Attestation.model_validate(fields | {"previous": serving.stable.digest if serving.stable else None})
