"""The harvest on the in-memory store: what is accepted, and that no crash loses or doubles anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.fakes.crashing_store import Crash, CrashPoint, crashing
from tests.fakes.memory_store import MemoryStore
from tests.support.spooled import (
    HEAD,
    START,
    TARGET,
    WINDOW_S,
    add_segment,
    add_shard,
    full_spool,
    states,
    truncate,
)
from tide.domain import HarvestResult, LineageRecord, Split, TargetContract, WindowManifest
from tide.errors import SpoolBusy
from tide.states import spool as spools
from tide.states.harvest import Harvester
from tide.states.shards import write_shard
from tide.store.base import Store

REPO = "svc-states"
NOW = START + 2 * WINDOW_S
W1, W2 = (spools.window_of(START + i * WINDOW_S, WINDOW_S) for i in (0, 1))


def _harvest(store: Store, spool: Path, now: float = NOW, **options: Any) -> HarvestResult:
    options = {"replica": "r0", "expected_target": TARGET, "head": HEAD} | options
    return Harvester(store=store, spool=spool, repository=REPO, window_s=WINDOW_S, **options).run(now)


def _tree(store: Store) -> dict[str, bytes]:
    return {o.path: store.read(REPO, "main", o.path) for o in store.list(REPO, "main")}


def _states_commits(store: Store) -> list[str]:
    """Subjects of the commits that brought states, merges left out."""
    commits = (c for c in store.log(REPO, "main") if len(c.parents) == 1)
    records = (LineageRecord.from_metadata(dict(c.metadata)) for c in commits)
    return sorted(r.subject for r in records if r is not None and r.kind == "states")


def _spooled(spool: Path) -> list[str]:
    return sorted(p.name for folder in ("train", "held_out", "requests") for p in (spool / folder).glob("*"))


def _manifest(store: Store, window: str = W1, replica: str = "r0") -> WindowManifest:
    return WindowManifest.model_validate_json(store.read(REPO, "main", f"windows/{window}/{replica}/manifest.json"))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_a_window_becomes_one_commit_with_its_files_in_place(store: MemoryStore, tmp_path: Path) -> None:
    train, held = add_shard(tmp_path, 1, 2), add_shard(tmp_path, 3, split=Split.GATE)
    add_segment(tmp_path, 1, 2, dropped=4)
    add_segment(tmp_path, 3, at=START + 20)
    result = _harvest(store, tmp_path)
    prefix = f"windows/{W1}/r0"
    tree = _tree(store)
    assert sorted(tree) == [
        f"{prefix}/held_out/{held.name}.json",
        f"{prefix}/held_out/{held.file}",
        f"{prefix}/manifest.json",
        f"{prefix}/requests.parquet",
        f"{prefix}/train/{train.name}.json",
        f"{prefix}/train/{train.file}",
    ]
    assert tree[f"{prefix}/train/{train.name}.json"] == train.to_json().encode()
    assert (result.windows, result.shards, result.rows, result.requests) == ((W1,), 2, 72, 3)
    assert result.size == train.size + held.size
    assert (result.dropped, result.excluded) == ({"queue_full": 4}, {"sampled": 2})
    assert result.commit == store.head(REPO, "main").id
    assert _spooled(tmp_path) == []
    assert list(store.branches(REPO)) == ["main"]


def test_the_commit_carries_the_lineage_of_its_states(store: MemoryStore, tmp_path: Path) -> None:
    add_shard(tmp_path, 1)
    add_segment(tmp_path, 1)
    result = _harvest(store, tmp_path)
    assert result.commit is not None
    record = LineageRecord.from_metadata(dict(store.head(REPO, result.commit).metadata))
    assert record is not None
    assert (record.kind, record.subject) == ("states", f"{W1}/r0")
    assert record.facts["windows"] == W1
    assert record.facts["engine"] == "sglang 0.5.23"
    assert record.facts["drafts"] == "d" * 64
    assert record.facts["target_contract"] == TARGET.digest()
    assert TargetContract.model_validate_json(record.facts["target"]) == TARGET


def test_every_closed_window_is_taken_and_the_open_one_left(store: MemoryStore, tmp_path: Path) -> None:
    full_spool(tmp_path)
    result = _harvest(store, tmp_path)
    assert result.windows == (W1, W2)
    assert _states_commits(store) == [f"{W1}/r0", f"{W2}/r0"]
    assert [name[-4:] for name in _spooled(tmp_path)] == ["json", "sors"]
    assert _harvest(store, tmp_path).windows == ()


def test_an_empty_spool_is_no_commit(store: MemoryStore, tmp_path: Path) -> None:
    result = _harvest(store, tmp_path)
    assert (result.commit, result.windows) == (None, ())
    assert len(list(store.log(REPO, "main"))) == 1


def _with_nan(spool: Path) -> str:
    bad = states(9)
    bad.last_hidden[3, 3] = torch.nan
    return write_shard(
        spool / "train", [bad], split=Split.TRAIN, target=TARGET, opened_at=START, closed_at=START + 5
    ).file


def _short(spool: Path) -> str:
    shard = add_shard(spool, 9)
    path = spool / "train" / f"{shard.name}.json"
    path.write_text(shard.model_copy(update={"rows": shard.rows + 1}).to_json())
    return shard.file


def _foreign_states(spool: Path) -> str:
    bad = states(9)
    bad.last_hidden.copy_(bad.last_hidden.roll(1, 0))
    return write_shard(
        spool / "train", [bad], split=Split.TRAIN, target=TARGET, opened_at=START, closed_at=START + 5
    ).file


def _truncated(spool: Path) -> str:
    file = add_shard(spool, 9).file
    truncate(spool / "train" / file)
    return file


def _flipped(spool: Path) -> str:
    path = spool / "train" / add_shard(spool, 9).file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path.name


def _other(spool: Path, **parts: Any) -> str:
    return add_shard(spool, 9, target=TARGET.model_copy(update=parts)).file


def _wrong_width(spool: Path) -> str:
    shard = add_shard(spool, 9)
    path = spool / "train" / f"{shard.name}.json"
    path.write_text(shard.model_copy(update={"target": TARGET.model_copy(update={"hidden_size": 16})}).to_json())
    return shard.file


def _held_out_in_train(spool: Path) -> str:
    shard = add_shard(spool, 9, split=Split.GATE)
    (spool / "train").mkdir(exist_ok=True)
    for suffix in (".safetensors", ".json"):
        (spool / "held_out" / f"{shard.name}{suffix}").rename(spool / "train" / f"{shard.name}{suffix}")
    return shard.file


def _without_file(spool: Path) -> str:
    shard = add_shard(spool, 9)
    (spool / "train" / shard.file).unlink()
    return shard.file


@pytest.mark.parametrize(
    ("make", "rule", "named"),
    [
        (_with_nan, "non_finite", "row 3"),
        (_short, "wrong_length", "expected (25,)"),
        (_foreign_states, "wrong_states", "lm_head"),
        (_truncated, "truncated", "bytes"),
        (_flipped, "wrong_digest", "sha256"),
        (_wrong_width, "wrong_target", "hidden_size"),
        (lambda spool: _other(spool, weights="c" * 64), "wrong_target", "weights"),
        (lambda spool: _other(spool, tokenizer="c" * 64), "wrong_target", "tokenizer"),
        (_held_out_in_train, "wrong_split", "held_out"),
        (_without_file, "missing_file", "no file"),
    ],
)
def test_a_bad_shard_is_quarantined_with_its_reason_and_the_good_one_goes_on(
    store: MemoryStore, tmp_path: Path, make: Any, rule: str, named: str
) -> None:
    good = add_shard(tmp_path, 1)
    bad = make(tmp_path)
    result = _harvest(store, tmp_path)
    assert (result.shards, result.quarantined) == (1, {rule: 1})
    assert _manifest(store).shards == (good.name,)
    assert _manifest(store).quarantined == {bad: rule}
    note = json.loads((tmp_path / "quarantine" / f"{Path(bad).stem}.reason.json").read_text())
    assert note["rule"] == rule
    assert named in note["detail"]
    assert _spooled(tmp_path) == []


def test_without_an_expected_target_the_first_shard_decides(store: MemoryStore, tmp_path: Path) -> None:
    first = add_shard(tmp_path, 1, at=START + 1)
    add_shard(tmp_path, 2, at=START + 2, target=TARGET.model_copy(update={"weights": "c" * 64}))
    result = _harvest(store, tmp_path, expected_target=None)
    assert result.quarantined == {"wrong_target": 1}
    assert _manifest(store).shards == (first.name,)


def test_a_bad_segment_is_quarantined_and_the_others_are_merged(store: MemoryStore, tmp_path: Path) -> None:
    add_segment(tmp_path, 1)
    truncate(tmp_path / "requests" / add_segment(tmp_path, 2, at=START + 20).file)
    result = _harvest(store, tmp_path)
    assert (result.requests, result.quarantined) == (1, {"bad_segment": 1})
    table = tmp_path / "t.parquet"
    table.write_bytes(store.read(REPO, "main", f"windows/{W1}/r0/requests.parquet"))
    assert pq.read_table(table)["request"].to_pylist() == [f"{1:064x}"]


def test_a_shard_that_main_has_already_is_counted_and_not_stored_twice(store: MemoryStore, tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    data = (tmp_path / "train" / shard.file).read_bytes()
    _harvest(store, tmp_path)
    (tmp_path / "train" / shard.file).write_bytes(data)
    later = shard.model_copy(update={"closed_at": START + WINDOW_S + 5})
    (tmp_path / "train" / f"{shard.name}.json").write_text(later.to_json())
    before = _tree(store)
    result = _harvest(store, tmp_path)
    assert (result.duplicates, result.shards, result.rows) == (1, 0, 0)
    assert _tree(store) == before
    assert sum(shard.file in path for path in before) == 1
    assert _spooled(tmp_path) == []


def test_files_that_come_late_join_their_window(store: MemoryStore, tmp_path: Path) -> None:
    first = add_shard(tmp_path, 1)
    add_segment(tmp_path, 1, dropped=1)
    _harvest(store, tmp_path)
    late = add_shard(tmp_path, 2, at=START + 299)
    add_segment(tmp_path, 2, at=START + 299, dropped=2)
    result = _harvest(store, tmp_path)
    assert (result.shards, result.requests, result.dropped) == (1, 1, {"queue_full": 2})
    manifest = _manifest(store)
    assert manifest.shards == tuple(sorted([first.name, late.name]))
    assert (manifest.rows, manifest.requests, manifest.dropped) == (48, 2, {"queue_full": 3})
    assert _states_commits(store) == [f"{W1}/r0"] * 2


def test_two_replicas_harvest_one_window_side_by_side(store: MemoryStore, tmp_path: Path) -> None:
    for replica, seed in (("r0", 1), ("r1", 2)):
        add_shard(tmp_path / replica, seed)
        _harvest(store, tmp_path / replica, replica=replica)
    assert _manifest(store, replica="r0").shards != _manifest(store, replica="r1").shards
    assert _states_commits(store) == [f"{W1}/r0", f"{W1}/r1"]


def test_a_spool_that_is_being_harvested_is_left_alone(store: MemoryStore, tmp_path: Path) -> None:
    add_shard(tmp_path, 1)
    with spools.locked(tmp_path), pytest.raises(SpoolBusy):
        _harvest(store, tmp_path)
    assert len(_spooled(tmp_path)) == 2


def test_what_a_broken_off_run_staged_and_this_one_refuses_is_not_committed(store: MemoryStore, tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    add_segment(tmp_path, 1)
    store.create_repository(REPO)
    branch = f"harvest-{W1}-r0"
    store.create_branch(REPO, branch, "main")
    store.put(REPO, branch, f"windows/{W1}/r0/train/{'e' * 64}.safetensors", b"of a run with other settings")
    _harvest(store, tmp_path)
    assert [path for path in _tree(store) if path.endswith(".safetensors")] == [f"windows/{W1}/r0/train/{shard.file}"]


def _steps(monkeypatch: pytest.MonkeyPatch, point: CrashPoint) -> None:
    """Make every move and removal of a spool file a step of the crash point as well."""
    for name in ("unlink", "replace"):
        real = getattr(Path, name)

        def step(self: Path, *args: Any, _real: Any = real, **kwargs: Any) -> Any:
            if self.parent.name in ("train", "held_out", "requests"):
                return point.step(_real, self, *args, **kwargs)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(Path, name, step)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spool = tmp_path_factory.mktemp("filled")
    full_spool(spool)
    return spool


@pytest.fixture(scope="module")
def undisturbed(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], int]:
    """What a run without a crash leaves on main, and in how many steps."""
    spool, store, point = tmp_path_factory.mktemp("calm") / "spool", MemoryStore(), CrashPoint()
    shutil.copytree(filled, spool)
    with pytest.MonkeyPatch.context() as patch:
        _steps(patch, point)
        _harvest(crashing(store, point), spool)
    return _tree(store), point.steps


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_step_is_completed_by_the_next_run_with_the_same_content_and_one_commit(
    filled: Path, undisturbed: tuple[dict[str, bytes], int], tmp_path: Path, after: bool
) -> None:
    tree, steps = undisturbed
    everything = {p.name for p in filled.rglob("*.safetensors")}
    assert steps > 40
    for at in range(steps):
        spool, store, point = tmp_path / str(at), MemoryStore(), CrashPoint(at, after=after)
        shutil.copytree(filled, spool)
        with pytest.MonkeyPatch.context() as patch:
            _steps(patch, point)
            with pytest.raises(Crash):
                _harvest(crashing(store, point), spool)
        stored = {Path(path).name for path in _tree(store)} if REPO in list(store.repositories()) else set()
        assert everything <= stored | {p.name for p in spool.rglob("*.safetensors")}, f"step {at}: a file is lost"
        _harvest(store, spool)
        assert _tree(store) == tree, f"step {at}"
        assert _states_commits(store) == [f"{W1}/r0", f"{W2}/r0"], f"step {at}"
        assert list(store.branches(REPO)) == ["main"], f"step {at}"
        assert len(_spooled(spool)) == 2, f"step {at}: only the open window's shard is left"
        assert len(list((spool / "quarantine").glob("*"))) == 6, f"step {at}: two refused files with manifest and note"
        shutil.rmtree(spool)
