"""Experiments: pinned to one content, split without leaks, and declared to DVC as they are."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.fakes.memory_store import MemoryStore
from tests.support.tiny import TARGET, request_info
from tests.unit.test_shards import states
from tide import experiment, pinned, wiring
from tide.config import Policy
from tide.domain import Split
from tide.errors import BadInputError, ConfigError, NotFound
from tide.states.shards import write_shard

REPOSITORY = Path(__file__).parents[2]
STATES, DRAFTS = "svc-states", "svc-drafts"


def put(store: MemoryStore, folder: Path, window: str, split: Split, seed: int) -> None:
    """One shard of one request, whose conversation is of the split."""
    made = replace(states(f"{split}-{seed}", 3, 4, seed=seed), info=request_info(f"{split}-{seed}", split))
    shard = write_shard(folder, [made], split=split, target=TARGET, opened_at=0.0, closed_at=float(seed))
    for name in (shard.file, f"{shard.name}.json"):
        store.put(STATES, "main", f"windows/{window}/r0/{split.folder}/{name}", folder / name)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store with one window, and a project that pins it, as the working folder."""
    store = MemoryStore()
    store.create_repository(STATES)
    for seed, split in enumerate((Split.TRAIN, Split.GATE, Split.SELECTION)):
        put(store, tmp_path / "made", "20260101T000000Z", split, seed=seed)
    store.commit(STATES, "main", "harvest", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wiring, "store", lambda _config: store)
    Path("params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    pinned.pin(store, STATES, DRAFTS, "main")
    return store


def test_a_pin_names_commit_and_content_and_no_parent_before_the_first_promotion(store: MemoryStore) -> None:
    found = json.loads(pinned.LOCK.read_text())
    assert (found["repository"], found["commit"]) == (STATES, store.head(STATES, "main").id)
    assert (found["parent"], len(found["digest"])) == (None, 64)


def test_the_same_shards_under_another_commit_have_the_same_digest(store: MemoryStore, tmp_path: Path) -> None:
    before = pinned.Pinned.load()
    store.put(STATES, "main", "windows/20260101T000500Z/r0/requests.parquet", b"no shard")
    store.commit(STATES, "main", "later", {})
    after = pinned.pin(store, STATES, DRAFTS, "main")
    assert after.commit != before.commit
    assert after.digest == before.digest
    put(store, tmp_path / "made", "20260101T001000Z", Split.TRAIN, seed=9)
    store.commit(STATES, "main", "more", {})
    assert pinned.pin(store, STATES, DRAFTS, "main").digest != before.digest


def test_fetch_brings_each_split_to_its_own_folder(store: MemoryStore) -> None:
    experiment.fetch()
    names = {s.value: len(list((experiment.SHARDS / s.value).glob("*.safetensors"))) for s in Split}
    assert names == {"train": 1, "gate": 1, "selection": 1}


@pytest.mark.usefixtures("store")
def test_a_lock_whose_commit_holds_other_data_is_refused() -> None:
    lock = pinned.Pinned.load().model_copy(update={"digest": "0" * 64})
    pinned.LOCK.write_text(lock.to_json())
    with pytest.raises(BadInputError, match="tide snapshot pin"):
        experiment.fetch()
    assert not experiment.SHARDS.exists()


@pytest.mark.usefixtures("store")
def test_a_lock_of_a_commit_that_is_not_in_the_store_says_how_to_pin_one() -> None:
    lock = pinned.Pinned.load().model_copy(update={"commit": "f" * 64})
    pinned.LOCK.write_text(lock.to_json())
    with pytest.raises(NotFound, match="tide snapshot pin"):
        experiment.fetch()


_PINNED = {"repository": "svc-states", "commit": "c", "digest": "d" * 64}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "does not exist"),
        ("{}", "repository: Field required"),
        ("not json", "content: Invalid JSON"),
        ("\xff", "content: Invalid JSON"),
        (json.dumps(_PINNED | {"commit": ""}), "commit: String should have at least 1"),
        (json.dumps(_PINNED | {"digest": "d" * 63}), "digest: String should match"),
        (json.dumps(_PINNED | {"comit": "c"}), "comit: Extra inputs"),
        (json.dumps(_PINNED | {"parent": "e" * 64}), "parent without a drafts_repository"),
    ],
)
def test_a_missing_or_wrong_lock_names_what_is_wrong_and_how_to_make_one(
    tmp_path: Path, content: str | None, what: str
) -> None:
    path = tmp_path / "lock.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=f"lock.json.*{what}.*tide snapshot pin main"):
        pinned.Pinned.load(path)


def test_a_lock_whose_parent_is_not_in_the_store_is_refused_and_leaves_no_parent(store: MemoryStore) -> None:
    store.create_repository(DRAFTS)
    lock = pinned.Pinned.load().model_copy(update={"drafts_repository": DRAFTS, "parent": "e" * 64})
    pinned.LOCK.write_text(lock.to_json())
    with pytest.raises(NotFound, match=r"parent draft.*e{64}.*tide snapshot pin"):
        experiment.fetch()
    assert not experiment.PARENT.exists()


@pytest.mark.usefixtures("store")
def test_split_counts_requests_and_finds_a_conversation_that_leaked() -> None:
    experiment.fetch()
    experiment.split()
    counts = json.loads(experiment.SPLIT.read_text())
    assert {name: found["requests"] for name, found in counts.items()} == {"gate": 1, "selection": 1, "train": 1}
    for file in (experiment.SHARDS / "gate").iterdir():
        (experiment.SHARDS / "train" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BadInputError, match="stands in gate and in train"):
        experiment.split()


@pytest.mark.usefixtures("store")
def test_a_commit_without_gate_requests_is_refused_before_anything_is_trained() -> None:
    experiment.fetch()
    for file in (experiment.SHARDS / "gate").iterdir():
        file.unlink()
    with pytest.raises(BadInputError, match="no requests of gate"):
        experiment.split()


@pytest.mark.usefixtures("store")
def test_a_stage_that_fails_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    pinned.LOCK.unlink()
    assert experiment.main(["fetch"]) == 1
    assert capsys.readouterr().err.startswith("error: data/snapshot.lock.json does not exist")


@pytest.mark.usefixtures("store")
def test_two_stages_in_one_checkout_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, most, begun = [], [], threading.Event()

    def stage() -> None:
        inside.append(1)
        most.append(len(inside))
        begun.set()
        time.sleep(0.2)
        inside.pop()

    monkeypatch.setitem(experiment.STAGES, "train", stage)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(experiment.main, ["train"])
        assert begun.wait(60)  # its name stands in the lock file by now
        assert list(pool.map(lambda _: experiment.main(["train"]), range(3))) == [0, 0, 0]
        assert first.result() == 0
    assert most == [1, 1, 1, 1]
    assert f"waiting for process {os.getpid()}" in capsys.readouterr().out


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("train: {learning_rate: 7}", "train.learning_rate is 7: Input should be less than 1"),
        ("train: {learning_rate: -.inf}", "train.learning_rate is -inf"),
        ("promotion: {min_gain: .inf}", "promotion.min_gain is inf: Input should be a finite number"),
        ("promotion: {min_gain: .nan}", "promotion.min_gain is nan"),
        ("replay_fraction: 1", "replay_fraction is 1: Input should be less than 1"),
        ("draft_steps: three", "draft_steps is 'three': Input should be a valid integer"),
        ("train: {epochs: 2.5}", "train.epochs is 2.5: Input should be a valid integer"),
        ("train: [1, 2]", "train is [1, 2]: Input should be a valid dictionary"),
        ("train: {lerning_rate: 0.1}", "train.lerning_rate is no parameter"),
        ("trian: {}", "trian is no parameter"),
        ("- train", "it holds ['train']"),
        ("0", "it holds 0"),
        ("train: {", "is no YAML"),
        ("\x00", "is no YAML"),
        (
            "train: {epochs: 0, batch_size: 0}",
            "train.epochs is 0: Input should be greater than or equal to 1; train.batch",
        ),
        (None, "does not exist: restore it"),
    ],
)
def test_wrong_parameters_name_the_file_the_parameter_and_what_is_allowed(
    content: str | None, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        Path("params.yaml").unlink()
    else:
        Path("params.yaml").write_text(content)
    assert experiment.main(["fetch"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: params.yaml")
    assert what in said
    assert not experiment.SHARDS.exists()


@pytest.mark.usefixtures("store")
def test_an_empty_file_of_parameters_stands_for_the_defaults() -> None:
    Path("params.yaml").write_text("# nothing differs\n")
    assert Policy.load(Path("params.yaml")) == Policy()


def test_dvc_knows_every_stage_every_parameter_it_reads_and_caches_nothing_large() -> None:
    declared = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    assert {name: stage["cmd"] for name, stage in declared.items()} == {
        name: f"python -m tide.experiment {name}" for name in experiment.STAGES
    }
    assert {p for stage in declared.values() for p in stage.get("params", ())} <= params.keys()
    outs = [out for stage in declared.values() for kind in ("outs", "metrics", "plots") for out in stage.get(kind, ())]
    assert all(next(iter(out.values()))["cache"] is False for out in outs)
    Policy.model_validate(params)
