"""The ledger: write-once records of what was decided, refusals included, on a branch of the drafts repository.

Owns the branch, the names (sortable by time) and that nothing is rewritten. Knows nothing of what the records mean.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TypeVar

from tide import repositories
from tide.domain import Record, Signed
from tide.errors import NotFound, NothingToCommit
from tide.store.base import Store

BRANCH = "ledger"
ROOT = "ledger/"
ERASURE, ERASED = "erasure", "erased"
"""Kinds of an erasure's two records: before the first byte is deleted, and after the last."""

R = TypeVar("R", bound=Record)


def append(
    store: Store,
    repository: str,
    kind: str,
    record: Record,
    *,
    signed: Signed | None = None,
    attachments: Mapping[str, bytes] | None = None,
    at: float | None = None,
    once: str | None = None,
) -> str:
    """Write one record, with files that belong to it, in one commit.

    Args:
        kind: ``drift``, ``verdict``, ``promotion`` ...
        signed: the record in its signed envelope, kept beside it.
        attachments: content by file suffix, for example ``{".html": ...}``.
        at: seconds since the epoch; now when None.
        once: 8 hexadecimal digits in place of random ones; with ``at`` given, there is one such record for ever.

    Returns:
        Path of the record on the ledger branch.

    Raises:
        AlreadyExists: there is such a record of ``once``; nothing was written.
    """
    repositories.ensure_drafts(store, repository)
    store.create_branch(repository, BRANCH, "main")
    moment = time.time() if at is None else at
    # Microseconds: two records of one millisecond would sort by chance, and the newest of a kind decides.
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment)) + f"{int(moment * 1e6) % 1_000_000:06d}Z"
    name = f"{ROOT}{stamp}-{kind}-{once or uuid.uuid4().hex[:8]}"
    signature = {".sig": signed.to_json().encode()} if signed else {}
    for suffix, content in {**(attachments or {}), **signature}.items():
        store.put(repository, BRANCH, name + suffix, content, if_absent=True)
    store.put(repository, BRANCH, f"{name}.json", record.to_json().encode(), if_absent=True)
    _commit(store, repository, f"{name}.json", f"{kind} {record.digest()[:12]}", kind)
    return f"{name}.json"


def _commit(store: Store, repository: str, path: str, message: str, kind: str) -> None:
    """Commit what was staged; another writer's commit may have taken it along, for the branch is everybody's."""
    try:
        store.commit(repository, BRANCH, message, {"tide.ledger": kind})
    except NothingToCommit:
        if any(change.path == path for change in store.uncommitted(repository, BRANCH)):
            raise


def newest(store: Store, repository: str, kind: str, model: type[R]) -> R | None:
    """The latest record of a kind, or None."""
    names = [name for name in _records(store, repository) if f"-{kind}-" in name]
    return model.model_validate_json(store.read(repository, BRANCH, max(names))) if names else None


def every(store: Store, repository: str, kind: str, model: type[R]) -> list[R]:
    """All records of a kind, oldest first; none when there is no ledger yet."""
    names = _records(store, repository)
    # The stamp has no dash: <stamp>-<kind>-<8 hex>.json
    mine = [name for name in names if name.removeprefix(ROOT).partition("-")[2].rpartition("-")[0] == kind]
    return [model.model_validate_json(store.read(repository, BRANCH, name)) for name in sorted(mine)]


def _records(store: Store, repository: str) -> list[str]:
    """Paths of all records; an attachment may be JSON too, but has one more suffix."""
    try:
        paths = [item.path for item in store.list(repository, BRANCH, ROOT)]
    except NotFound:
        return []
    return [path for path in paths if path.endswith(".json") and "." not in path.removesuffix(".json")]
