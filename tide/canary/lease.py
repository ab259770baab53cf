"""The canary's lease in ``serving.json``: taken, taken over from a promoter that died, and given back.

Owns its two merges, each a compare-and-swap like every change of ``serving.json``. Works over the
Store port. Knows nothing of replicas, or of how a canary goes.
"""

from __future__ import annotations

from tide.domain import CanaryLease, CanaryReport, Serving, Signed
from tide.errors import CanaryBusy, Conflict, HookRefused
from tide.lineage import metadata as lineage
from tide.serving.serving_file import SERVING, drop_branch, merge_change, read_serving
from tide.store.base import Store


def attestation_path(generation: int) -> str:
    """Where the statement stands by which a candidate is tried for a generation."""
    return f"attestations/{generation:06d}-canary.json"


def take(store: Store, repository: str, before: Serving, lease: CanaryLease, attestation: Signed) -> Serving:
    """Merge the lease into ``serving.json``; returns what it says then.

    Args:
        before: what it said when this promotion began, without a lease.
        attestation: signed, of the kind ``canary``, for the generation that would follow.

    Raises:
        Conflict, CanaryBusy: another promotion was faster.
        HookRefused: the guard of the repository is older than this version of TIDE.
    """
    generation = before.generation + 1
    wanted = before.model_copy(update={"canary": lease})
    record = lineage.canary_record(lease, generation)
    files = {SERVING: wanted, attestation_path(generation): attestation}
    branch = _branch(lease, generation)
    try:
        merge_change(store, repository, branch, before, files, record, f"try {lease.draft[:12]}")
    except HookRefused as error:
        if "attestations/" not in str(error):
            raise
        raise HookRefused(f"{error}; its guard may be older than this TIDE: `tide init` renews it") from error
    except Conflict as error:
        now = read_serving(store, repository)
        if now.canary is not None and (now.generation, now.stable) == (before.generation, before.stable):
            raise CanaryBusy(f"{repository}: {now.canary.draft[:12]} went on trial first: wait for its end") from error
        raise
    if read_serving(store, repository).canary != lease:
        raise CanaryBusy(f"{repository}: another promotion of {lease.draft[:12]} was faster: wait for its end")
    return wanted


def tidy_up(store: Store, repository: str, held: Serving) -> None:
    """Delete the branch that a killed run merged its lease by; harmless to repeat."""
    assert held.canary is not None
    drop_branch(store, repository, _branch(held.canary, held.generation + 1))


def release(store: Store, repository: str, held: Serving, report: CanaryReport) -> None:
    """Merge ``serving.json`` without the lease; what serves stays as it is. Harmless when it is gone already.

    Raises:
        Conflict: another change was faster.
    """
    assert held.canary is not None
    if read_serving(store, repository) != held:
        return
    tidy_up(store, repository, held)
    generation = held.generation + 1
    record = lineage.release_record(held.canary, generation, report)
    branch = f"release-{generation}-{held.canary.draft[:12]}"
    wanted = held.model_copy(update={"canary": None})
    merge_change(
        store, repository, branch, held, {SERVING: wanted}, record, f"{report.outcome}: {held.canary.draft[:12]}"
    )


def _branch(lease: CanaryLease, generation: int) -> str:
    return f"canary-{generation}-{lease.draft[:12]}"
