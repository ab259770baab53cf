"""The real SpecForge on a tiny target: from scratch, warm start, poison, cancellation, a kill while saving."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.tiny_target import tiny_target, tiny_target_states
from tide.domain import Split, TrainingConfig, TrainingProgress
from tide.errors import ContractMismatch, TrainingDiverged, TrainingError
from tide.models.draft_files import load_draft
from tide.models.target_files import bundle_contract
from tide.states.shards import write_shard
from tide.trainer.base import TrainingData, TrainingResult
from tide.trainer.hardware import Hardware
from tide.trainer.specforge import SpecForgeTrainer
from tide.trainer.vocabulary import Vocabulary

CONFIG = TrainingConfig(
    epochs=16, batch_size=4, learning_rate=5e-3, ttt_length=2, checkpoints=2, draft_vocab_size=256, prompt_rows=4
)


@dataclass
class Rig:
    """A target, its bundle and a shard of 13 good and 3 poisoned requests."""

    root: Path
    bundle: Path
    data: TrainingData
    trainer: SpecForgeTrainer = field(default_factory=lambda: SpecForgeTrainer(hardware=Hardware("cpu")))

    def train(
        self, name: str, parent: Path | None = None, **changes: Any
    ) -> tuple[TrainingResult, list[TrainingProgress]]:
        seen: list[TrainingProgress] = []
        result = self.trainer.train(
            self.data,
            CONFIG.model_copy(update=changes),
            parent=parent,
            bundle=self.bundle,
            workdir=self.root / name,
            on_progress=seen.append,
        )
        return result, seen


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    root = tmp_path_factory.mktemp("training")
    model = tiny_target(root / "target")
    bundle = SpecForgeTrainer().prepare_bundle(model, root / "bundle")
    states = tiny_target_states(model, 16)
    nan = states[3].aux_hidden.clone()
    nan[5, 5] = float("nan")
    states[3] = replace(states[3], info=states[3].info.model_copy(update={"request": "nan"}), aux_hidden=nan)
    for index, name, prompt in ((6, "mask", states[6].rows), (9, "short", 99)):
        info = states[index].info.model_copy(update={"request": name})
        states[index] = replace(states[index], info=info, prompt_len=prompt)
    target = bundle_contract(bundle)
    shard = write_shard(root / "shards", states, split=Split.TRAIN, target=target, opened_at=1.0, closed_at=2.0)
    return Rig(root, bundle, TrainingData(shards=(root / "shards" / shard.file,), target=target))


@pytest.fixture(scope="module")
def scratch(rig: Rig) -> tuple[TrainingResult, list[TrainingProgress]]:
    return rig.train("scratch")


@pytest.fixture(scope="module")
def warm(
    rig: Rig, scratch: tuple[TrainingResult, list[TrainingProgress]]
) -> tuple[TrainingResult, list[TrainingProgress]]:
    """One step from the first draft at a rate that changes nothing, in a folder with another run's vocabulary cache."""
    foreign = rig.root / "warm" / "cache" / "vocab_mapping"
    foreign.mkdir(parents=True)
    wrong = Vocabulary.of_low_ids(256, 512)
    torch.save({"d2t": wrong.d2t, "t2d": wrong.t2d}, foreign / "0.pt")
    return rig.train("warm", parent=scratch[0].checkpoints[-1].draft, learning_rate=1e-30, max_steps=1, checkpoints=1)


def trainers() -> list[psutil.Process]:
    """Training processes that this process has started and that still run."""
    return [
        p
        for p in psutil.Process().children(recursive=True)
        if p.status() != psutil.STATUS_ZOMBIE and "tide.trainer.rank" in p.cmdline()
    ]


def test_a_first_draft_learns_and_is_exported_in_the_engines_format(
    scratch: tuple[TrainingResult, list[TrainingProgress]],
) -> None:
    result, seen = scratch
    assert [p.step for p in seen] == list(range(1, 49))
    assert {p.total_steps for p in seen} == {48}
    assert seen[-1].eta_s == 0.0
    assert seen[0].loss is not None
    assert result.final_loss < 0.85 * seen[0].loss
    assert [c.step for c in result.checkpoints] == [24, 48]
    for checkpoint in result.checkpoints:
        draft = load_draft(checkpoint.draft, expected=checkpoint.digest)
        assert checkpoint.draft.name == checkpoint.digest
        assert draft.contract.aux_layers == (1, 3, 4)
        assert draft.tensors["fc.weight"].dtype == torch.bfloat16
        assert "embed_tokens.weight" not in draft.tensors
    assert result.coverage == 1.0
    assert result.environment["specforge"] == "0.2.0"


def test_poisoned_requests_are_named_and_the_rest_train(
    scratch: tuple[TrainingResult, list[TrainingProgress]],
) -> None:
    result, _ = scratch
    assert result.samples == 13
    assert {r.request: r.reason.split(":")[0] for r in result.refused} == {
        "nan": "not finite",
        "mask": "zero mask",
        "short": "short rows",
    }


def test_samples_and_optimizer_states_are_not_kept(
    rig: Rig, scratch: tuple[TrainingResult, list[TrainingProgress]]
) -> None:
    (run,) = (rig.root / "scratch").glob("run-*")
    assert sorted(p.name for p in run.iterdir()) == ["specforge.log", "specforge.yaml", "vocab_mapping.pt"]


def test_the_same_run_gives_the_same_drafts(rig: Rig, scratch: tuple[TrainingResult, list[TrainingProgress]]) -> None:
    again, _ = rig.train("again")
    assert [c.digest for c in again.checkpoints] == [c.digest for c in scratch[0].checkpoints]


def test_a_warm_start_is_the_parent_before_its_first_step(
    scratch: tuple[TrainingResult, list[TrainingProgress]], warm: tuple[TrainingResult, list[TrainingProgress]]
) -> None:
    parent, result = scratch[0].checkpoints[-1], warm[0]
    assert not result.vocabulary_rechosen
    assert result.checkpoints[-1].digest == parent.digest, "weights or vocabulary map changed on the way in"


def test_a_warm_start_begins_where_its_parent_ended(
    scratch: tuple[TrainingResult, list[TrainingProgress]], warm: tuple[TrainingResult, list[TrainingProgress]]
) -> None:
    """Measured by SpecForge itself before the first update; a wrong map starts near the loss of an untrained draft."""
    first = warm[1][0].loss
    last = [p.loss for p in scratch[1][-3:] if p.loss is not None]
    assert first is not None
    assert first < 1.06 * max(last)


def test_an_exception_in_the_progress_callback_leaves_no_process(rig: Rig) -> None:
    running: list[int] = []

    def cancel(progress: TrainingProgress) -> None:
        running.append(len(trainers()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.trainer.train(
            rig.data, CONFIG, parent=None, bundle=rig.bundle, workdir=rig.root / "cancel", on_progress=cancel
        )
    assert running == [1]
    assert trainers() == []
    assert not (rig.root / "cancel" / "drafts").exists()


def kill_while_saving(workdir: Path, done: threading.Event) -> None:
    """SIGKILL the trainer when the folder of its second checkpoint appears: the first is complete, this one is not."""
    while not done.is_set():
        if list(workdir.glob("run-*/output/tide-step2")):
            for process in trainers():
                os.kill(process.pid, signal.SIGKILL)
            return
        time.sleep(0.0005)


def test_a_kill_while_a_checkpoint_is_saved_leaves_no_draft(rig: Rig) -> None:
    done = threading.Event()
    killer = threading.Thread(target=kill_while_saving, args=(rig.root / "killed", done))
    killer.start()
    try:
        with pytest.raises(TrainingError, match="SIGKILL"):
            rig.train("killed", max_steps=8, checkpoints=8)
    finally:
        done.set()
        killer.join()
    assert not (rig.root / "killed" / "drafts").exists()
    assert trainers() == []


def test_a_rate_that_destroys_the_weights_stops_the_run(rig: Rig) -> None:
    trainer = SpecForgeTrainer(hardware=Hardware("cpu"), bad_steps=2)
    config = CONFIG.model_copy(update={"learning_rate": 1e30, "epochs": 50})
    with pytest.raises(TrainingDiverged, match="nan"):
        trainer.train(
            rig.data, config, parent=None, bundle=rig.bundle, workdir=rig.root / "nan", on_progress=lambda _: None
        )
    assert trainers() == []


def test_data_of_another_target_than_the_bundle_is_refused_before_anything_starts(rig: Rig) -> None:
    other = rig.data.target.model_copy(update={"weights": "0" * 64})
    with pytest.raises(ContractMismatch, match="weights"):
        rig.trainer.train(
            rig.data.model_copy(update={"target": other}),
            CONFIG,
            parent=None,
            bundle=rig.bundle,
            workdir=rig.root / "other",
            on_progress=lambda _: None,
        )
    assert not (rig.root / "other").exists()
