"""``serving.json`` on the drafts repository's main: the one truth about what serves, and how it is changed.

Owns what stands beside it (attestations, promotions), its branch and its merge: a compare-and-swap, and safe to repeat
after a crash at any point. Works over the Store port. Knows nothing of replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from tide.domain import Attestation, DraftModel, LineageRecord, Promotion, Serving, Signed, Value
from tide.errors import BadInputError, Conflict, NotFound, NothingToCommit, SignatureRefused, StoreError
from tide.lineage import metadata as lineage
from tide.names import require_digest
from tide.repositories import MAIN
from tide.signatures.attestation import check_attestation
from tide.signatures.signing import TrustedKeys
from tide.store.base import Store

SERVING = "serving.json"
PROMOTIONS = "promotions/"
SIGNED_VERDICT = "verdict.signed.json"

V = TypeVar("V", bound=Value)


def draft_prefix(digest: str) -> str:
    """Folder of a draft inside the drafts repository. Raises BadInputError for what is no digest."""
    return f"drafts/{require_digest(digest, 'draft digest')}/"


def attestation_path(generation: int) -> str:
    """Where the signed statement behind a generation stands."""
    return f"attestations/{generation:06d}.json"


def promotion_path(generation: int) -> str:
    """Where the record of a generation's rollout stands."""
    return f"{PROMOTIONS}{generation:06d}.json"


def read_serving(store: Store, repository: str, ref: str = MAIN) -> Serving:
    """The one truth; generation 0 when nothing was promoted yet. Raises BadInputError when it cannot be read."""
    try:
        return read_record(store, repository, ref, SERVING, Serving)
    except NotFound:
        return Serving()


def read_draft(store: Store, repository: str, ref: str, digest: str) -> DraftModel:
    """Record of a draft at a ref. Raises BadInputError when it cannot be read."""
    return read_record(store, repository, ref, f"{draft_prefix(digest)}draft.json", DraftModel)


def candidate_on(store: Store, repository: str, ref: str) -> str:
    """Digest of the candidate that a branch holds, by the lineage of its last commit.

    Raises:
        NotFound: its last commit is neither a candidate nor a verdict on one.
    """
    record = LineageRecord.from_metadata(store.head(repository, ref).metadata)
    if record is not None and record.kind in ("candidate", "pooled"):
        return record.subject
    if record is not None and record.kind == "verdict":
        return record.parents["candidate"]
    raise NotFound(f"{repository}@{ref} holds no candidate: its last commit has no such lineage")


def read_promotion(store: Store, repository: str, generation: int) -> Promotion:
    """Record of a generation's rollout. Raises NotFound, BadInputError."""
    return read_record(store, repository, MAIN, promotion_path(generation), Promotion)


def read_promotions(store: Store, repository: str) -> list[Promotion]:
    """Every change of what serves, oldest first. Raises BadInputError when one cannot be read."""
    paths = sorted(item.path for item in store.list(repository, MAIN, PROMOTIONS))
    return [read_record(store, repository, MAIN, path, Promotion) for path in paths]


def read_signed_verdict(store: Store, repository: str, ref: str, digest: str) -> Signed:
    """The signed verdict on a draft at a ref.

    Raises:
        SignatureRefused: there is none: nobody with the key has judged it.
    """
    try:
        return read_record(store, repository, ref, draft_prefix(digest) + SIGNED_VERDICT, Signed)
    except NotFound as error:
        raise SignatureRefused(
            f"draft {digest[:12]} on {repository}@{ref} has no signed verdict: run the promote flow on it"
        ) from error


def read_attestation(store: Store, repository: str, trusted: TrustedKeys) -> tuple[Signed, Attestation]:
    """The statement behind what ``serving.json`` says now, checked.

    Raises:
        SignatureRefused: missing, forged, or about another draft or generation: somebody went around the promoter.
    """
    serving = read_serving(store, repository)
    if serving.stable is None:
        raise NotFound(f"{repository}: nothing was promoted yet")
    path = attestation_path(serving.generation)
    try:
        signed = read_record(store, repository, MAIN, path, Signed)
    except NotFound as error:
        raise SignatureRefused(
            f"{repository}@{MAIN}: generation {serving.generation} has no {path}: somebody changed {SERVING} around "
            "the promoter; look at main's log with `tide doctor`"
        ) from error
    found = check_attestation(signed, serving.stable.digest, trusted)
    if found.kind == "canary":
        raise SignatureRefused(f"{repository}@{MAIN}:{path} lets draft {found.draft[:12]} be tried, not serve")
    if found.generation != serving.generation:
        raise SignatureRefused(
            f"{repository}@{MAIN}:{path} attests generation {found.generation}, {SERVING} is at {serving.generation}"
        )
    return signed, found


def change_serving(
    store: Store,
    repository: str,
    source: str,
    before: Serving,
    serving: Serving,
    promotion: Promotion,
    attestation: Signed,
) -> None:
    """Merge a new ``serving.json``: one branch from main that rewrites it, so that who merges second gets a Conflict.

    Args:
        source: ref that holds the draft's folder.
        before: what it must say until then, the lease of its own canary included.

    Raises:
        Conflict: another promotion was faster, or the canary was ended.
    """
    files = {
        SERVING: serving,
        promotion_path(serving.generation): promotion,
        attestation_path(serving.generation): attestation,
    }
    merge_change(
        store,
        repository,
        _branch_of(serving),
        before,
        files,
        lineage.promotion_record(promotion),
        f"{promotion.kind} to {promotion.draft[:12]} as generation {serving.generation}",
        source=source,
    )
    tidy_up(store, repository, serving)


def merge_change(
    store: Store,
    repository: str,
    branch: str,
    before: Serving,
    files: Mapping[str, Value],
    record: LineageRecord,
    message: str,
    *,
    source: str = MAIN,
) -> None:
    """One change of ``serving.json``: a branch from main with these files, merged, and gone again.

    What a killed run left under the branch's name is dropped first, since it may build on what main no longer says.

    Raises:
        Conflict: ``serving.json`` is not as it was ``before``, or another change was merged first.
    """
    drop_branch(store, repository, branch)
    store.create_branch(repository, branch, MAIN)
    require_unchanged(store, repository, before)
    if source != MAIN:
        with contextlib.suppress(NothingToCommit):
            store.merge(repository, source, branch, f"files for: {message}", record.to_metadata())
    for path, content in files.items():
        store.put(repository, branch, path, content.to_json().encode())
    store.commit(repository, branch, message, record.to_metadata())
    try:
        store.merge(repository, branch, MAIN, message, record.to_metadata())
    except StoreError:
        with contextlib.suppress(StoreError):
            drop_branch(store, repository, branch)
        raise
    drop_branch(store, repository, branch)


def drop_branch(store: Store, repository: str, branch: str) -> None:
    """Delete a branch of a change with whatever a killed run left on it; a missing one is fine."""
    if branch in store.branches(repository):
        store.reset(repository, branch)
        store.delete_branch(repository, branch)


def _branch_of(serving: Serving) -> str:
    assert serving.stable is not None
    return f"serving-{serving.generation}-{serving.stable.digest[:12]}"


def require_unchanged(store: Store, repository: str, before: Serving) -> None:
    """Raises Conflict when ``serving.json`` says something else by now: who goes on would overwrite it."""
    found = read_serving(store, repository)
    if found.generation != before.generation:
        raise Conflict(
            f"{repository}: serving went to generation {found.generation} meanwhile: evaluate the candidate again"
        )
    if found != before:
        trial = f"{found.canary.draft[:12]} by {found.canary.run}" if found.canary else "none"
        raise Conflict(f"{repository}: the canary changed meanwhile (now {trial}): wait for its end, and try again")


def tidy_up(store: Store, repository: str, serving: Serving) -> None:
    """Tag the generation that main is at and delete its branch; harmless to repeat."""
    assert serving.stable is not None
    digest = serving.stable.digest[:12]
    tag = f"gen-{serving.generation:06d}-{digest}"
    if tag not in dict(store.tags(repository)):
        store.tag(repository, tag, MAIN)
    drop_branch(store, repository, _branch_of(serving))


def read_record(store: Store, repository: str, ref: str, path: str, kind: type[V]) -> V:
    """A record that stands at a ref. Raises NotFound; BadInputError when it cannot be read."""
    try:
        return kind.model_validate_json(store.read(repository, ref, path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise BadInputError(f"{repository}@{ref}:{path} is no {kind.__name__}: {where}: {first['msg']}") from error
