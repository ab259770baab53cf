"""Several ranks: two that really train, the rehearsal, and ranks that hang, are cancelled or lose their parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tiny_target import tiny_target, tiny_target_states
from tide.domain import Split, TrainingConfig, TrainingProgress
from tide.errors import TrainingCancelled, TrainingStalled
from tide.models.draft_files import load_draft
from tide.models.target_files import bundle_contract
from tide.recovery.ownership import flow_alive, members, read_owner
from tide.states.shards import write_shard
from tide.trainer import process as process_module
from tide.trainer.base import TrainingData, TrainingResult
from tide.trainer.hardware import Hardware
from tide.trainer.memory import disk_bytes
from tide.trainer.process import GroupProcess, sigterm_cancels
from tide.trainer.progress import Watch, follow
from tide.trainer.run_config import environment
from tide.trainer.specforge import SpecForgeTrainer

REPOSITORY = Path(__file__).parents[2]
CONFIG = TrainingConfig(
    epochs=12,
    batch_size=8,
    device_batch_size=2,
    learning_rate=5e-3,
    ttt_length=2,
    checkpoints=2,
    draft_vocab_size=256,
    prompt_rows=4,
    max_length=64,
)
TWO = Hardware("cpu", 2)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("target")
    return SpecForgeTrainer().prepare_bundle(tiny_target(root / "target"), root / "bundle")


@pytest.fixture(scope="module")
def data(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    folder, target = tmp_path_factory.mktemp("shards"), bundle_contract(bundle)
    states = tiny_target_states(bundle.parent / "target", 15)
    shard = write_shard(folder, states, split=Split.TRAIN, target=target, opened_at=1.0, closed_at=2.0)
    return TrainingData(shards=(folder / shard.file,), target=target)


def train(data: TrainingData, bundle: Path, workdir: Path) -> tuple[TrainingResult, list[TrainingProgress], int]:
    """A run of two ranks, its progress, and the most bytes that its folder had."""
    seen: list[TrainingProgress] = []
    largest = 0

    def watch(progress: TrainingProgress) -> None:
        nonlocal largest
        seen.append(progress)
        owner = read_owner(workdir)
        assert owner is not None
        assert flow_alive(owner)
        largest = max(largest, sum(path.stat().st_size for path in workdir.rglob("*") if path.is_file()))

    result = SpecForgeTrainer(hardware=TWO).train(
        data, CONFIG, parent=None, bundle=bundle, workdir=workdir, on_progress=watch
    )
    return result, seen, largest


@pytest.fixture(scope="module")
def trained(
    data: TrainingData, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingResult, list[TrainingProgress], int, Path]:
    workdir = tmp_path_factory.mktemp("runs") / "first"
    return *train(data, bundle, workdir), workdir


def test_two_gloo_ranks_train_with_specforge_and_the_exported_draft_loads(
    trained: tuple[TrainingResult, list[TrainingProgress], int, Path],
) -> None:
    result, seen, _, workdir = trained
    # 15 samples are 8 a rank; 2 at once and 2 such batches a step make 2 steps an epoch.
    assert [progress.step for progress in seen] == list(range(1, 25))
    assert seen[0].loss is not None
    assert result.final_loss < 0.85 * seen[0].loss
    assert result.environment["ranks"] == "2"
    for checkpoint in result.checkpoints:
        assert load_draft(checkpoint.draft, expected=checkpoint.digest).tensors["fc.weight"].isfinite().all()
    (log,) = workdir.glob("run-*/specforge.log")
    assert re.search(r"^tide: one communicator, 2 ranks, gloo$", log.read_text(), re.M)
    owner = read_owner(workdir)
    assert owner is not None
    assert members(owner) == [], "no rank outlives its run"


def test_the_same_ranks_give_the_same_drafts(
    trained: tuple[TrainingResult, list[TrainingProgress], int, Path], data: TrainingData, bundle: Path, tmp_path: Path
) -> None:
    again, _, _ = train(data, bundle, tmp_path / "again")
    assert [c.digest for c in again.checkpoints] == [c.digest for c in trained[0].checkpoints]


def test_a_run_takes_no_more_disk_than_was_estimated(
    trained: tuple[TrainingResult, list[TrainingProgress], int, Path],
) -> None:
    result, _, largest, _ = trained
    contract = load_draft(result.checkpoints[0].draft).contract
    assert largest < disk_bytes(contract, tokens=result.tokens, checkpoints=CONFIG.checkpoints, width=4)


def test_the_rehearsal_takes_real_steps_on_two_ranks_and_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"max_length": 128})
    found = SpecForgeTrainer(hardware=Hardware("cpu")).preflight(
        config,
        target=bundle_contract(bundle),
        tokens=1000,
        parent=None,
        bundle=bundle,
        workdir=tmp_path,
        rehearse=True,
    )
    found.check()
    assert [f.name for f in found.findings] == ["devices", "batch", "target bundle", "disk", "memory", "rehearsal"]
    assert re.fullmatch(
        r"3 steps of 2 ranks, 2 x 128 rows in \d+ s; one communicator, 2 ranks, gloo", found.findings[-1].detail
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[GroupProcess]:
    """Two ranks under torchrun of which one never comes to the second collective."""
    command = ["tide.trainer.torchrun", "--standalone", "--nproc-per-node", "2", "--module", "tests.support.ranks"]
    env = environment(TWO, os.environ)
    command = [sys.executable, "-m", *command]
    with GroupProcess(command, mark=uuid.uuid4().hex, env=env, log=tmp_path / "log", cwd=REPOSITORY) as process:
        yield process


def wait_for_ranks(process: GroupProcess) -> None:
    """Until the first step was made together."""
    assert next(line for line in process.lines() if line is not None and line.startswith("step 1:"))


def test_a_rank_that_hangs_in_a_collective_ends_the_whole_run_by_the_step_it_hung_after(
    hung: GroupProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", 2.0)
    watch = Watch(5, time.monotonic(), first_step_s=240.0, step_s=2.0, bad_steps=3)
    with pytest.raises(TrainingStalled, match=r"no step after step 1 for .* it was ended"), hung:
        follow(hung.lines(0.2), watch, time.monotonic, lambda _: None)
    assert hung.members() == []


def test_cancelling_a_hung_trainer_leaves_no_rank(hung: GroupProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", 2.0)
    wait_for_ranks(hung)
    assert len(hung.members()) == 3, "torchrun and two ranks, each rank in a session of its own"
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(TrainingCancelled), sigterm_cancels(), hung:
        for _ in hung.lines(0.1):
            pass
    assert hung.members() == []


STARTER = """
import os, sys, uuid
from pathlib import Path
from tide.trainer.hardware import Hardware
from tide.trainer.process import GroupProcess
from tide.trainer.run_config import environment
command = [sys.executable, "-m", "tide.trainer.torchrun", "--standalone", "--nproc-per-node", "2"]
command += ["--module", "tests.support.ranks"]
env = environment(Hardware("cpu", 2), os.environ)
process = GroupProcess(command, mark=uuid.uuid4().hex, env=env, log=Path(sys.argv[1]), cwd=Path.cwd())
for line in process.lines():
    if line is not None and line.startswith("step 1:"):
        print(*process.members(), flush=True)
"""


def test_ranks_die_with_the_process_that_started_them_even_by_sigkill(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert starter.stdout is not None
    with starter:
        members = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(members) == 3
        starter.kill()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in members if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_the_made_up_rows_are_of_the_longest_length(bundle: Path, tmp_path: Path) -> None:
    from tide.trainer.rehearsal import made_up
    from tide.trainer.run import paths_of

    made_up(paths_of(tmp_path, bundle), bundle_contract(bundle), CONFIG, TWO, 3)
    files = sorted((tmp_path / "samples").rglob("*.ckpt"))
    assert len(files) == 3
    sample = torch.load(files[-1], weights_only=True)
    assert sample["input_ids"].shape == (CONFIG.max_length,)
    assert sample["aux_hidden_state"].shape == (1, CONFIG.max_length, 3 * 64)
    assert int(sample["loss_mask"].sum()) == CONFIG.max_length - 1
