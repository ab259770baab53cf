"""The harvest on a real lakeFS server with real shard files, and writers that are killed in the middle of a shard."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from infra.lakefs.server import LakefsServer
from tests.fakes.crashing_store import Crash, CrashPoint, crashing
from tests.support.spooled import START, TARGET, WINDOW_S, add_segment, add_shard, full_spool, harvester_of
from tide.domain import HarvestResult, LineageRecord, Shard, Split
from tide.errors import NotFound, StoreUnavailable
from tide.states import snapshots
from tide.states import spool as spools
from tide.states.shards import ShardReader
from tide.store.base import Store
from tide.store.lakefs import LakefsStore

NOW = START + 2 * WINDOW_S
_NUMBER = itertools.count()


@pytest.fixture
def store(lakefs_server: LakefsServer) -> LakefsStore:
    keys = lakefs_server.credentials
    return LakefsStore(lakefs_server.endpoint, keys.access_key, keys.secret_key)


@pytest.fixture
def repo() -> str:
    return f"harvest-{next(_NUMBER)}-states"


def _harvest(store: Store, repo: str, spool: Path) -> HarvestResult:
    harvester = harvester_of(store, spool, repo)
    return harvester.run(NOW)


def test_shards_arrive_byte_for_byte_and_readers_find_them(store: LakefsStore, repo: str, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    shard = add_shard(spool, 1, 2)
    held = add_shard(spool, 3, split=Split.GATE)
    add_segment(spool, 1, 2, 3)
    result = _harvest(store, repo, spool)
    snapshot = snapshots.describe(store, repo)
    assert (snapshot.commit, snapshot.shards, snapshot.rows) == (result.commit, 2, 72)
    assert snapshot.target == TARGET
    found = snapshots.manifests(store, repo, snapshot.commit, "train")
    [file] = snapshots.fetch(store, repo, snapshot.commit, found, tmp_path / "train")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == shard.name
    with ShardReader(file) as reader:
        assert [s.info for s in reader] == list(shard.requests)
    assert [m for _, m in snapshots.manifests(store, repo, snapshot.commit, "held_out")] == [held]
    [table] = snapshots.fetch_request_tables(store, repo, snapshot.commit, tmp_path / "tables")
    assert table.stat().st_size > 0


def test_bad_files_stay_behind_and_the_good_ones_of_every_closed_window_go_on(
    store: LakefsStore, repo: str, tmp_path: Path
) -> None:
    full_spool(tmp_path)
    result = _harvest(store, repo, tmp_path)
    assert (result.shards, result.requests) == (3, 4)
    assert result.quarantined == {"bad_segment": 1, "truncated": 1}
    assert list(store.branches(repo)) == ["main"]
    kinds = [LineageRecord.from_metadata(dict(c.metadata)) for c in store.log(repo, "main") if len(c.parents) == 1]
    assert [r.subject for r in kinds if r] == [f"{window}/r0" for window in result.windows][::-1]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_call_to_the_store_is_completed_by_the_next_run(
    store: LakefsStore, tmp_path: Path, after: bool
) -> None:
    point, repo = CrashPoint(), f"calm-{next(_NUMBER)}"
    tree = _filled_and_harvested(crashing(store, point), store, repo, tmp_path / "calm")
    for at in range(point.steps):
        repo, spool = f"crash-{next(_NUMBER)}", tmp_path / str(at)
        _fill(spool)
        with pytest.raises(Crash):
            _harvest(crashing(store, CrashPoint(at, after=after)), repo, spool)
        _harvest(store, repo, spool)
        assert _tree(store, repo) == tree, f"call {at}"
        assert sum(len(c.parents) == 1 for c in store.log(repo, "main")) == 1, f"call {at}: one commit of states"
        assert list(store.branches(repo)) == ["main"], f"call {at}"
        assert list((spool / "train").iterdir()) == [], f"call {at}"


_FILES: dict[str, bytes] = {}


def _fill(spool: Path) -> None:
    """The same files every time: a shard's name is the digest of bytes that differ from one writing to the next."""
    if not _FILES:
        add_shard(spool, 1)
        add_segment(spool, 1)
        _FILES.update({str(p.relative_to(spool)): p.read_bytes() for p in spool.rglob("*") if p.is_file()})
    for name, data in _FILES.items():
        (spool / name).parent.mkdir(parents=True, exist_ok=True)
        (spool / name).write_bytes(data)


def _filled_and_harvested(through: Store, store: Store, repo: str, spool: Path) -> dict[str, bytes]:
    _fill(spool)
    _harvest(through, repo, spool)
    return _tree(store, repo)


def _tree(store: Store, repo: str) -> dict[str, bytes]:
    return {o.path: store.read(repo, "main", o.path) for o in store.list(repo, "main")}


def test_a_dead_store_keeps_every_file_in_the_spool(tmp_path: Path) -> None:
    full_spool(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*.safetensors"))
    dead = LakefsStore("http://127.0.0.1:9", "key", "secret", attempts=2, sleep=lambda _: None)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        _harvest(dead, "svc-states", tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*.safetensors")) == before


_WRITERS = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)  # a pool of threads does not survive the fork
from tests.support.spooled import START, TARGET, states
from tide.domain import Split
from tide.states.shards import write_shard

folder = Path(sys.argv[1]) / "train"
large = [states(seed, rows=4000) for seed in range(2)]
for turn in range(10):
    before = len(list(folder.glob("[!.]*.json")))
    child = os.fork()  # the imports above cost seconds; each writer is still a process of its own
    if child == 0:
        for n in range(200):
            rows = [replace(one, first_row=turn * 1000 + n) for one in large]
            write_shard(folder, rows, split=Split.TRAIN, target=TARGET, opened_at=START, closed_at=START + 10)
        os._exit(0)
    deadline = time.monotonic() + 10
    while len(list(folder.glob("[!.]*.json"))) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(turn * 0.0031)  # then at any moment of the second one
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool whose writers were killed at ten different moments of writing."""
    spool = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, "-c", _WRITERS, str(spool)], cwd=Path(__file__).parents[2], check=True, timeout=120)
    return spool


def test_nothing_partial_is_read_after_kill_9_inside_a_shard_write(killed: Path, store: LakefsStore, repo: str) -> None:
    listed = spools.closed_windows(killed, NOW, WINDOW_S)
    names = {s.manifest.name for window in listed.values() for s in window.shards}
    assert names, "the writer was killed before its first shard: the test saw nothing"
    for window in listed.values():
        for item in window.shards:
            assert hashlib.sha256(item.path.read_bytes()).hexdigest() == item.manifest.name
    result = _harvest(store, repo, killed)
    assert (result.shards, result.quarantined) == (len(names), {})
    stored = snapshots.manifests(store, repo, "main", "train")
    assert {manifest.name for _, manifest in stored} == names


def test_a_manifest_never_stands_without_its_whole_file(tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    (tmp_path / "train" / shard.file).rename(tmp_path / "train" / f".{shard.file}.tmp")
    (tmp_path / "train" / f"{shard.name}.json").unlink()
    assert spools.closed_windows(tmp_path, NOW, WINDOW_S) == {}


def test_a_request_with_fewer_rows_than_tokens_never_reaches_main(
    store: LakefsStore, repo: str, tmp_path: Path
) -> None:
    good, short = add_shard(tmp_path, 1), add_shard(tmp_path, 2)
    path = tmp_path / "train" / f"{short.name}.json"
    path.write_text(Shard.model_validate_json(path.read_bytes()).model_copy(update={"rows": 23}).to_json())
    result = _harvest(store, repo, tmp_path)
    assert (result.shards, result.quarantined) == (1, {"wrong_length": 1})
    assert [m.name for _, m in snapshots.manifests(store, repo, "main", "train")] == [good.name]


def test_before_the_first_harvest_a_snapshot_says_what_to_do(store: LakefsStore, repo: str, tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    assert _harvest(store, repo, tmp_path).commit is None
    with pytest.raises(NotFound, match="harvest"):
        snapshots.describe(store, repo)
