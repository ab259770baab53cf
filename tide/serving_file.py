"""``serving.json`` on the drafts repository's main: the one truth about what serves, and how it is changed.

Owns what stands beside it (attestations, promotions), its branch and its merge: a compare-and-swap, and safe to repeat
after a crash at any point. Works over the Store port. Knows nothing of replicas.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

from pydantic import ValidationError

from tide import lineage
from tide.attestation import check_attestation
from tide.domain import Attestation, DraftModel, LineageRecord, Promotion, Serving, Signed, Value
from tide.errors import BadInputError, Conflict, NotFound, NothingToCommit, SignatureRefused
from tide.names import require_digest
from tide.repositories import MAIN
from tide.signing import TrustedKeys
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
        return _read(store, repository, ref, SERVING, Serving)
    except NotFound:
        return Serving()


def read_draft(store: Store, repository: str, ref: str, digest: str) -> DraftModel:
    """Record of a draft at a ref. Raises BadInputError when it cannot be read."""
    return _read(store, repository, ref, f"{draft_prefix(digest)}draft.json", DraftModel)


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
    return _read(store, repository, MAIN, promotion_path(generation), Promotion)


def read_promotions(store: Store, repository: str) -> list[Promotion]:
    """Every change of what serves, oldest first. Raises BadInputError when one cannot be read."""
    paths = sorted(item.path for item in store.list(repository, MAIN, PROMOTIONS))
    return [_read(store, repository, MAIN, path, Promotion) for path in paths]


def read_signed_verdict(store: Store, repository: str, ref: str, digest: str) -> Signed:
    """The signed verdict on a draft at a ref.

    Raises:
        SignatureRefused: there is none: nobody with the key has judged it.
    """
    try:
        return _read(store, repository, ref, draft_prefix(digest) + SIGNED_VERDICT, Signed)
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
        signed = _read(store, repository, MAIN, path, Signed)
    except NotFound as error:
        raise SignatureRefused(
            f"{repository}@{MAIN}: generation {serving.generation} has no {path}: somebody changed {SERVING} around "
            "the promoter; look at main's log with `tide doctor`"
        ) from error
    found = check_attestation(signed, serving.stable.digest, trusted)
    if found.generation != serving.generation:
        raise SignatureRefused(
            f"{repository}@{MAIN}:{path} attests generation {found.generation}, {SERVING} is at {serving.generation}"
        )
    return signed, found


def change_serving(
    store: Store, repository: str, source: str, serving: Serving, promotion: Promotion, attestation: Signed
) -> None:
    """Merge a new ``serving.json``: one branch from main that rewrites it, so that who merges second gets a Conflict.

    Run again after a crash with the same generation and draft it goes on where it was.

    Args:
        source: ref that holds the draft's folder.

    Raises:
        Conflict: another promotion was faster.
    """
    branch = f"serving-{serving.generation}-{promotion.draft[:12]}"
    record = lineage.promotion_record(promotion).to_metadata()
    store.create_branch(repository, branch, MAIN)
    if not _written(store, repository, branch, serving):
        store.reset(repository, branch)
        if source != MAIN:
            with contextlib.suppress(NothingToCommit):
                store.merge(repository, source, branch, f"candidate {promotion.draft[:12]}", record)
        for path, content in (
            (SERVING, serving),
            (promotion_path(serving.generation), promotion),
            (attestation_path(serving.generation), attestation),
        ):
            store.put(repository, branch, path, content.to_json().encode())
        store.commit(repository, branch, f"serve {promotion.draft[:12]} as generation {serving.generation}", record)
    with contextlib.suppress(NothingToCommit):
        store.merge(repository, branch, MAIN, f"{promotion.kind} to {promotion.draft[:12]}", record)
    tidy_up(store, repository, serving)


def tidy_up(store: Store, repository: str, serving: Serving) -> None:
    """Tag the generation that main is at and delete its branch; harmless to repeat."""
    assert serving.stable is not None
    digest = serving.stable.digest[:12]
    tag = f"gen-{serving.generation:06d}-{digest}"
    if tag not in dict(store.tags(repository)):
        store.tag(repository, tag, MAIN)
    branch = f"serving-{serving.generation}-{digest}"
    if branch in store.branches(repository):
        store.delete_branch(repository, branch)


def _written(store: Store, repository: str, branch: str, serving: Serving) -> bool:
    """True when an earlier, killed run committed this change on its branch already."""
    if read_serving(store, repository, branch) == serving and not any(store.uncommitted(repository, branch)):
        return True
    found = read_serving(store, repository).generation
    if found != serving.generation - 1:
        raise Conflict(f"{repository}: serving went to generation {found} meanwhile: evaluate the candidate again")
    return False


def _read(store: Store, repository: str, ref: str, path: str, kind: type[V]) -> V:
    try:
        return kind.model_validate_json(store.read(repository, ref, path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise BadInputError(f"{repository}@{ref}:{path} is no {kind.__name__}: {where}: {first['msg']}") from error
