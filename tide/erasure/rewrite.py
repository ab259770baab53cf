"""Live states written again without certain rows, on a branch of their own, and merged.

Owns the branch and what a window looks like afterwards. Works over the Store port. A branch that a killed run left
behind is taken away with the bytes it brought, so that nothing half-done stays and no bytes without a name.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath

from tide.domain import ShardRequest, WindowManifest
from tide.erasure.scan import Holding, Subjects
from tide.lineage import metadata as lineage
from tide.repositories import MAIN
from tide.states import requests
from tide.states.shard_checks import rewrite_shard
from tide.states.window_branch import MANIFEST, TABLE
from tide.store.base import Store

BRANCH = "erase-"
"""How the branch of an erasure begins; its id follows."""
_OURS = re.compile(rf"^{BRANCH}[0-9a-f]{{12}}$")


def rewrite(store: Store, repository: str, subjects: Subjects, live: Sequence[Holding]) -> None:
    """Bring ``main`` to a state without the subjects' rows.

    Raises:
        Conflict: main changed the same windows meanwhile; nothing was merged, look again and repeat.
        ShardError: a stored shard breaks a rule of its format; nothing was merged.
    """
    branch = f"{BRANCH}{subjects.id}"
    store.create_branch(repository, branch, MAIN)
    windows = [
        (prefix, list(group)) for prefix, group in groupby(sorted(live, key=lambda h: h.prefix), lambda h: h.prefix)
    ]
    for prefix, holdings in windows:
        _rewrite_window(store, repository, branch, prefix, holdings, subjects)
    number = len({request for holding in live for request in holding.requests})
    metadata = lineage.erasure_record(
        subjects.id, number, [prefix.split("/")[1] for prefix, _ in windows]
    ).to_metadata()
    message = f"erasure {subjects.id}"
    store.commit(repository, branch, message, metadata)
    store.merge(repository, branch, MAIN, message, metadata)
    store.delete_branch(repository, branch)


def _rewrite_window(
    store: Store, repository: str, branch: str, prefix: str, holdings: Iterable[Holding], subjects: Subjects
) -> None:
    manifest = WindowManifest.model_validate_json(store.read(repository, branch, prefix + MANIFEST))
    shards, rows, served = set(manifest.shards), manifest.rows, manifest.requests
    with tempfile.TemporaryDirectory(prefix="tide-erase-") as scratch:
        for holding in holdings:
            if holding.path.endswith(TABLE):
                data, served = requests.without_rows(
                    store.read(repository, branch, holding.path), holding.path, subjects.name
                )
                store.put(repository, branch, holding.path, data)
            else:
                name, left, fewer = _rewrite_shard(store, repository, branch, holding, subjects, Path(scratch))
                shards = (shards - {name}) | left
                rows -= fewer
    after = manifest.model_copy(update={"shards": tuple(sorted(shards)), "rows": rows, "requests": served})
    store.put(repository, branch, prefix + MANIFEST, after.to_json().encode())


def _rewrite_shard(
    store: Store, repository: str, branch: str, holding: Holding, subjects: Subjects, scratch: Path
) -> tuple[str, set[str], int]:
    """Returns the old name, the new one if any is left, and by how many rows there are fewer."""
    stored = PurePosixPath(holding.path)
    old = scratch / "old" / stored.with_suffix(".safetensors").name
    old.parent.mkdir(exist_ok=True)
    for file in (old, old.with_suffix(".json")):
        store.download(repository, branch, str(stored.with_name(file.name)), file)

    def is_meant(info: ShardRequest) -> bool:
        return subjects.name(info.request, info.conversation)

    made = rewrite_shard(old, scratch / "new", is_meant)
    if made is not None:
        for name in (made.file, f"{made.name}.json"):
            store.put(repository, branch, str(stored.with_name(name)), scratch / "new" / name)
            (scratch / "new" / name).unlink()
    for file in (old, old.with_suffix(".json")):
        store.delete(repository, branch, str(stored.with_name(file.name)))
        file.unlink()
    return stored.stem, {made.name} if made else set(), holding.rows - (made.rows if made else 0)


def discard_leftovers(store: Store, repository: str) -> list[str]:
    """Take away branches of erasures that were killed, with the bytes that only they have. Returns their names."""
    leftovers = [branch for branch in store.branches(repository) if _OURS.match(branch)]
    merged = {commit.id for commit in store.log(repository, MAIN)} if leftovers else set()
    for branch in leftovers:
        _erase_staged(store, repository, branch)
        own = [commit for commit in store.log(repository, branch) if commit.id not in merged]
        for commit in own:
            for change in store.diff(repository, commit.parents[0], commit.id):
                if change.kind != "removed":
                    store.erase_bytes(repository, store.physical_address(repository, commit.id, change.path))
        store.reset(repository, branch)
        store.delete_branch(repository, branch)
    return leftovers


def _erase_staged(store: Store, repository: str, branch: str) -> None:
    for change in store.uncommitted(repository, branch):
        if change.kind != "removed":
            store.erase_bytes(repository, store.physical_address(repository, branch, change.path))
