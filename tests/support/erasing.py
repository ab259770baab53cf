"""A service whose states hold a conversation in many places, and what is left of it, for tests of erasure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support.spooled import START, WINDOW_S, add_segment, add_shard, harvester_of, states
from tide.domain import LineageRecord, Split
from tide.erasure.erase import Eraser
from tide.erasure.scan import Subjects
from tide.states import requests
from tide.store.base import Store

NOW = START + 2 * WINDOW_S
SEED = 2
"""The conversation that is erased; it stands in the train shard with 1 and 3, and alone in a shard of its own."""
SUBJECTS = Subjects(conversations=(f"{SEED:08x}",))
DRAFT = "c" * 64


def fill_spool(spool: Path) -> None:
    """Two closed windows; the second holds nothing of the conversation."""
    add_shard(spool, 1, SEED, 3)
    add_shard(spool, 4, split=Split.GATE)
    add_segment(spool, 1, SEED, 3, 4)
    add_shard(spool, 5, at=START + WINDOW_S + 1)
    add_segment(spool, 5, at=START + WINDOW_S + 2)


def add_late(spool: Path) -> None:
    """More of the conversation for the first window, alone in its shard, and a row in the table."""
    add_shard(spool, SEED, at=START + 200)
    add_segment(spool, SEED, at=START + 201)


def harvest(store: Store, repository: str, spool: Path, now: float = NOW) -> None:
    """Bring closed windows in."""
    harvester_of(store, spool, repository).run(now)


def filled(store: Store, states_repo: str, drafts_repo: str, spool: Path) -> None:
    """States of two harvests, a candidate trained on the first, and a draft nobody knows the states of."""
    fill_spool(spool)
    harvest(store, states_repo, spool)
    commit = store.head(states_repo, "main").id
    add_late(spool)
    harvest(store, states_repo, spool)
    store.create_repository(drafts_repo)
    for digest, parent in ((DRAFT, f"{states_repo}@{commit}"), ("e" * 64, "imported")):
        branch = f"candidate-{digest[:6]}"
        store.create_branch(drafts_repo, branch, "main")
        store.put(drafts_repo, branch, f"drafts/{digest}/draft.json", digest.encode())
        record = LineageRecord(kind="candidate", subject=digest, parents={"states": parent})
        store.commit(drafts_repo, branch, "candidate", record.to_metadata())


def eraser(store: Store, states_repo: str, drafts_repo: str, root: Path) -> Eraser:
    """Over ``root/spool`` and ``root/home``."""
    return Eraser(
        store=store,
        states=states_repo,
        drafts=drafts_repo,
        spool_folder=root / "spool",
        home=root / "home",
        clock=lambda: NOW + 100_000,
    )


def leaks(blobs: Iterable[bytes], seed: int = SEED) -> list[str]:
    """What of a conversation these bytes still have: its token ids, its hashes, in the open or in a table."""
    names = [f"{seed:064x}", f"{seed:08x}"]
    quoted = {f"name {name}": f'"{name}"'.encode() for name in names}
    tokens = states(seed).input_ids.numpy().tobytes()
    found = []
    for blob in blobs:
        found += ["token ids"] if tokens in blob else []
        found += [what for what, bytes_ in quoted.items() if bytes_ in blob]
        if blob[:4] == b"PAR1":
            table = requests.parse_table(blob, "raw block")
            rows = table["request"].to_pylist() + table["conversation"].to_pylist()
            found += [f"row {name}" for name in names if name in rows]
    return found
