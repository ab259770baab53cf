"""Replicas brought to a draft: its files in DRAFT_DIR, the marks beside them, swaps, and the way back when one fails.

Owns DRAFT_DIR on this host. Works over the ports. Knows nothing of ``serving.json`` or of why a draft is to serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tide.attestation import attestation_file
from tide.domain import ReplicaSwap, Signed
from tide.engine.base import Engine
from tide.errors import EngineError, TideError
from tide.files import whole_folder, write_durably
from tide.names import require_digest
from tide.serving_file import draft_prefix
from tide.store.base import Store

NO_DRAFT = "none"
DRAFT_FILES = ("config.json", "draft.json", "model.safetensors")
"""What stands under a draft's folder in the drafts repository and in DRAFT_DIR."""

Restart = Callable[[Engine, str], float]
"""Restarts a replica with a draft when a hot swap cannot do (no draft yet, another shape); returns seconds."""


def install_draft(store: Store, repository: str, ref: str, digest: str, draft_dir: Path) -> Path:
    """Bring a draft to ``DRAFT_DIR/<digest>/``: temporary folder, rename. What is there is left alone.

    Raises:
        BadInputError: no digest, but a path perhaps: branches and their lineage can be written by others.
    """
    folder = draft_dir / require_digest(digest, "draft digest")
    if folder.exists():
        return folder
    with whole_folder(folder, replace=False) as temporary:
        for name in DRAFT_FILES:
            store.download(repository, ref, f"{draft_prefix(digest)}{name}", temporary / name)
    return folder


def mark_serving(draft_dir: Path, digest: str, signed: Signed | None = None) -> None:
    """Write ``DRAFT_DIR/serving``, which a replica loads at its start, and before it what lets the draft serve."""
    if signed is not None:
        write_durably(draft_dir / attestation_file(digest), signed.to_json().encode())
    write_durably(draft_dir / "serving", f"{digest}\n".encode())


def swap_all(
    replicas: Sequence[Engine],
    draft_dir: Path,
    restart: Restart | None,
    digest: str,
    incumbent: str | None,
    signed: Signed,
) -> list[ReplicaSwap]:
    """Swap replica by replica; when one fails, those already changed get the incumbent back, and it is raised."""
    done: list[ReplicaSwap] = []
    before = {replica.name: replica.active_draft() for replica in replicas}
    mark_serving(draft_dir, digest, signed)
    try:
        for replica in replicas:
            done.append(swap_one(replica, digest, restart))  # noqa: PERF401 (on a failure, those done count)
    except TideError:
        touched = {replica.name: before[replica.name] for replica in replicas[: len(done) + 1]}
        restore(replicas, draft_dir, touched, incumbent)
        raise
    return done


def restore(replicas: Sequence[Engine], draft_dir: Path, before: Mapping[str, str], incumbent: str | None) -> None:
    """Give every replica touched its draft back, the failing one included: it may have failed after applying.

    A replica that does not answer loads the incumbent when it starts again, and ``reconcile`` sees to the rest.

    Args:
        before: what each replica touched served before.
        incumbent: what ``serving.json`` says; None before the first promotion.
    """
    if incumbent is None:
        (draft_dir / "serving").unlink(missing_ok=True)
    else:
        mark_serving(draft_dir, incumbent)
    for replica in replicas:
        wanted = incumbent or before.get(replica.name, NO_DRAFT)
        if replica.name not in before or wanted == NO_DRAFT:
            continue
        with contextlib.suppress(EngineError):
            if replica.active_draft() != wanted:
                replica.swap_draft(wanted)


def swap_one(replica: Engine, digest: str, restart: Restart | None) -> ReplicaSwap:
    """Bring one replica to a draft. Raises EngineError when it reports another one afterwards."""
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
