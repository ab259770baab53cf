"""Changing what serves, as steps over ports: install the draft, change ``serving.json``, swap each replica, or restore.

Owns ``serving.json``, the order of a promotion and what happens when a step fails. Prefect is not needed, so that a
rollback works with it down. Knows nothing of why a draft is promoted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tide import lineage
from tide.domain import DraftModel, Promotion, ReplicaSwap, Serving, ServingDraft, Value
from tide.engine.base import Engine
from tide.errors import BadInputError, Conflict, EngineError, NotFound, NothingToCommit, StoreError, TideError
from tide.files import whole_folder, write_durably
from tide.store.base import Store

SERVING = "serving.json"
NO_DRAFT = "none"
DRAFT_FILES = ("config.json", "draft.json", "model.safetensors")
"""What stands under a draft's folder in the drafts repository and in DRAFT_DIR."""

V = TypeVar("V", bound=Value)
Restart = Callable[[Engine, str], float]
"""Restarts a replica with a draft when a hot swap cannot do (no draft yet, another shape); returns seconds."""


def read_serving(store: Store, repository: str, ref: str = "main") -> Serving:
    """The one truth; generation 0 when nothing was promoted yet. Raises BadInputError when it cannot be read."""
    try:
        return _read(store, repository, ref, SERVING, Serving)
    except NotFound:
        return Serving()


def draft_prefix(digest: str) -> str:
    """Folder of a draft inside the drafts repository."""
    return f"drafts/{digest}/"


def read_draft(store: Store, repository: str, ref: str, digest: str) -> DraftModel:
    """Record of a draft at a ref. Raises BadInputError when it cannot be read."""
    return _read(store, repository, ref, f"{draft_prefix(digest)}draft.json", DraftModel)


def _read(store: Store, repository: str, ref: str, path: str, kind: type[V]) -> V:
    try:
        return kind.model_validate_json(store.read(repository, ref, path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise BadInputError(f"{repository}@{ref}:{path} is no {kind.__name__}: {where}: {first['msg']}") from error


def install_draft(store: Store, repository: str, ref: str, digest: str, draft_dir: Path) -> Path:
    """Bring a draft to ``DRAFT_DIR/<digest>/``: temporary folder, rename. What is there is left alone."""
    folder = draft_dir / digest
    if folder.exists():
        return folder
    with whole_folder(folder, replace=False) as temporary:
        for name in DRAFT_FILES:
            store.download(repository, ref, f"{draft_prefix(digest)}{name}", temporary / name)
    return folder


def mark_serving(draft_dir: Path, digest: str) -> None:
    """Write ``DRAFT_DIR/serving``, which a replica loads when it starts."""
    write_durably(draft_dir / "serving", f"{digest}\n".encode())


def promote(
    store: Store,
    repository: str,
    *,
    candidate_ref: str,
    digest: str,
    verdict: str | None,
    expected_generation: int,
    replicas: Sequence[Engine],
    draft_dir: Path,
    restart: Restart | None = None,
    kind: str = "promotion",
) -> Promotion:
    """Make a draft the one in serving: swap every replica, then merge the new ``serving.json``; restore on failure.

    Args:
        candidate_ref: branch or tag that holds ``drafts/<digest>/``.
        verdict: digest of the verdict that allows it.
        expected_generation: generation the verdict was made against; another one means that it is stale.

    Raises:
        Conflict: the incumbent changed meanwhile; evaluate again.
        EngineError: a replica failed; the incumbent was restored on all that had changed.
    """
    before = read_serving(store, repository)
    if before.generation != expected_generation:
        raise Conflict(
            f"{repository}: serving is at generation {before.generation}, the verdict was made against "
            f"{expected_generation}: evaluate the candidate again"
        )
    after = Serving(
        generation=before.generation + 1, stable=ServingDraft(digest=digest, verdict=verdict), previous=before.stable
    )
    install_draft(store, repository, candidate_ref, digest, draft_dir)
    swaps = swap_all(replicas, digest, before.stable.digest if before.stable else None, draft_dir, restart)
    promotion = Promotion(
        kind="rollback" if kind == "rollback" else "promotion",
        generation=after.generation,
        draft=digest,
        previous=before.stable.digest if before.stable else None,
        verdict=verdict,
        replicas=tuple(swaps),
        at=time.time(),
    )
    try:
        _merge_serving(store, repository, candidate_ref, after, promotion)
    except StoreError:
        if before.stable:
            swap_all(replicas, before.stable.digest, digest, draft_dir, restart)
        raise
    return promotion


def swap_all(
    replicas: Sequence[Engine], digest: str, incumbent: str | None, draft_dir: Path, restart: Restart | None
) -> list[ReplicaSwap]:
    """Swap replica by replica; when one fails, those already changed get the incumbent back, and it is raised."""
    done: list[ReplicaSwap] = []
    mark_serving(draft_dir, digest)
    try:
        for replica in replicas:
            done.append(_swap_one(replica, digest, restart))  # noqa: PERF401 (on a failure, those done count)
    except TideError:
        _restore(replicas[: len(done) + 1], incumbent, draft_dir)
        raise
    return done


def _restore(replicas: Sequence[Engine], incumbent: str | None, draft_dir: Path) -> None:
    """Give the incumbent back to every replica touched, the failing one included: it may have failed after applying.

    A replica that does not answer loads the incumbent when it starts again, and ``reconcile`` sees to the rest.
    """
    if incumbent is None:
        (draft_dir / "serving").unlink(missing_ok=True)
        return
    mark_serving(draft_dir, incumbent)
    for replica in replicas:
        with contextlib.suppress(EngineError):
            if replica.active_draft() != incumbent:
                replica.swap_draft(incumbent)


def _swap_one(replica: Engine, digest: str, restart: Restart | None) -> ReplicaSwap:
    before = replica.active_draft()
    if before == NO_DRAFT and restart is not None:
        seconds, restarted = restart(replica, digest), True
    elif before == digest:
        seconds, restarted = 0.0, False
    else:
        seconds, restarted = replica.swap_draft(digest).seconds, False
    after = replica.active_draft()
    if after != digest:
        raise EngineError(f"replica {replica.name} reports draft {after[:12]} after a swap to {digest[:12]}")
    return ReplicaSwap(replica=replica.name, before=before, after=after, seconds=seconds, restarted=restarted)


def _merge_serving(store: Store, repository: str, source: str, serving: Serving, promotion: Promotion) -> None:
    """One branch from main that rewrites ``serving.json``: who merges second gets a Conflict."""
    branch = f"serving-{serving.generation}-{promotion.draft[:12]}"
    record = lineage.promotion_record(promotion).to_metadata()
    store.create_branch(repository, branch, "main")
    found = read_serving(store, repository, branch).generation
    if found != serving.generation - 1:
        raise Conflict(f"{repository}: serving went to generation {found} meanwhile: evaluate the candidate again")
    if source != "main":
        with contextlib.suppress(NothingToCommit):
            store.merge(repository, source, branch, f"candidate {promotion.draft[:12]}", record)
    store.put(repository, branch, SERVING, serving.to_json().encode())
    store.put(repository, branch, f"promotions/{serving.generation:06d}.json", promotion.to_json().encode())
    store.commit(repository, branch, f"serve {promotion.draft[:12]} as generation {serving.generation}", record)
    store.merge(repository, branch, "main", f"{promotion.kind} to {promotion.draft[:12]}", record)
    store.tag(repository, f"gen-{serving.generation:06d}-{promotion.draft[:12]}", "main")
    store.delete_branch(repository, branch)


def rollback(
    store: Store, repository: str, *, replicas: Sequence[Engine], draft_dir: Path, restart: Restart | None = None
) -> Promotion:
    """Put the previous draft back into serving, as a new generation.

    Raises:
        NotFound: nothing was in serving before.
    """
    serving = read_serving(store, repository)
    if serving.previous is None:
        raise NotFound(f"{repository}: generation {serving.generation} has no previous draft to go back to")
    return promote(
        store,
        repository,
        candidate_ref="main",
        digest=serving.previous.digest,
        verdict=serving.previous.verdict,
        expected_generation=serving.generation,
        replicas=replicas,
        draft_dir=draft_dir,
        restart=restart,
        kind="rollback",
    )


def reconcile(store: Store, repository: str, *, replicas: Sequence[Engine], draft_dir: Path) -> list[ReplicaSwap]:
    """Make every replica match ``serving.json``; returns the swaps that were needed."""
    stable = read_serving(store, repository).stable
    if stable is None:
        return []
    install_draft(store, repository, "main", stable.digest, draft_dir)
    mark_serving(draft_dir, stable.digest)
    return [_swap_one(r, stable.digest, None) for r in replicas if r.active_draft() != stable.digest]
