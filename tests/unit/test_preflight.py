"""The pre-flight: each check by itself, with made-up sizes, and what refuses a run by name."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.shapes import contract
from tests.support.tiny_target import tiny_target
from tide.domain import TrainingConfig
from tide.errors import TrainingCancelled, TrainingError
from tide.models.target_files import bundle_contract
from tide.trainer import preflight as module
from tide.trainer.base import Finding, Preflight
from tide.trainer.hardware import Hardware
from tide.trainer.memory import training_memory
from tide.trainer.preflight import Asked, driver, examine, memory
from tide.trainer.specforge import SpecForgeTrainer

GCD = 64 * 10**9
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("target")
    return SpecForgeTrainer().prepare_bundle(tiny_target(root / "target"), root / "bundle")


def asked(bundle: Path, workdir: Path, tokens: int = 1000, **changes: object) -> Asked:
    config = TrainingConfig(draft_vocab_size=256, max_length=128).model_copy(update=changes)
    return Asked(config, bundle_contract(bundle), tokens, None, bundle, workdir)


def states(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in found}


def test_a_cpu_worker_is_fit_and_does_not_rehearse_what_has_no_collective(bundle: Path, tmp_path: Path) -> None:
    found = list(examine(asked(bundle, tmp_path / "train"), Hardware("cpu")))
    assert states(found) == dict.fromkeys(["devices", "batch", "target bundle", "disk", "memory", "rehearsal"], "ok")
    assert "no collective" in found[-1].detail
    Preflight(findings=tuple(found)).check()
    assert not (tmp_path / "train").exists(), "looking writes nothing"


def test_length_times_sdpa_over_a_gcds_memory_is_refused_by_name() -> None:
    config = TrainingConfig(max_length=2176, batch_size=32, ttt_length=7, attention_backend="sdpa")
    found = memory(contract(), config, Hardware("gpu", 8), GCD)
    assert found.state == "wrong"
    assert "attention scores" in found.detail
    assert "flex_attention" in found.fix
    flex = config.model_copy(update={"attention_backend": None})
    assert memory(contract(), flex, Hardware("gpu", 8), GCD).state == "ok"


def test_the_limit_is_a_share_of_the_memory_to_the_byte() -> None:
    config = TrainingConfig(max_length=512, batch_size=4)
    needs = training_memory(contract(), length=512, batch=4, ttt_length=3, backend="sdpa", width=4).total
    whole = config.model_copy(update={"preflight": config.preflight.model_copy(update={"memory_share": 1.0})})
    assert memory(contract(), whole, Hardware("cpu"), needs).state == "ok"
    assert memory(contract(), whole, Hardware("cpu"), needs - 1).state == "wrong"
    assert memory(contract(), config, Hardware("cpu"), needs).state == "wrong", "0.9 of it is too little"
    assert memory(contract(), config, Hardware("cpu"), None).state == "unknown"


def test_too_little_disk_is_refused_with_both_figures(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2 * 10**9))
    found = list(examine(asked(bundle, tmp_path, tokens=10_000_000), Hardware("cpu")))
    (disk,) = (finding for finding in found if finding.name == "disk")
    assert disk.state == "wrong"
    assert "2.0 GB are free" in disk.detail
    assert "rehearsal" not in states(found), "nothing is tried on a worker that is unfit"
    with pytest.raises(TrainingError, match=r"cannot train: disk: .*TIDE_HOME"):
        Preflight(findings=tuple(found)).check()


def test_a_bundle_of_another_target_is_refused_part_by_part(bundle: Path, tmp_path: Path) -> None:
    one = asked(bundle, tmp_path)
    other = Asked(one.config, one.target.model_copy(update={"weights": "0" * 64}), 10, None, bundle, tmp_path)
    found = states(list(examine(other, Hardware("cpu"))))
    assert found["target bundle"] == "wrong"
    assert "disk" not in found


def test_a_bundle_with_a_cut_off_head_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    (key,) = (name for name in tensors if "embed" in name)
    save_file(tensors | {key: tensors[key][:-1].clone()}, file)
    found = list(examine(asked(copy, tmp_path), Hardware("cpu")))
    (refused,) = (finding for finding in found if finding.state == "wrong")
    assert refused.name == "target bundle"
    assert "is (511, 64), not (512, 64)" in refused.detail


def test_no_bundle_is_refused_and_the_other_checks_go_on(bundle: Path, tmp_path: Path) -> None:
    one = asked(bundle, tmp_path)
    found = states(list(examine(Asked(one.config, one.target, 10, None, tmp_path, tmp_path), Hardware("cpu"))))
    assert found == {"devices": "ok", "batch": "ok", "target bundle": "wrong"}


def test_a_batch_that_does_not_divide_among_ranks_is_refused(bundle: Path, tmp_path: Path) -> None:
    found = states(list(examine(asked(bundle, tmp_path, batch_size=3), Hardware("cpu", 2))))
    assert found["batch"] == "wrong"


def test_gpus_that_are_expected_and_missing_are_the_finding(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TIDE_TRAIN_DEVICE", "gpu")
    found = list(examine(asked(bundle, tmp_path)))
    assert states(found) == {"devices": "wrong", "target bundle": "ok"}
    assert "torch sees no GPU" in found[0].detail


def test_rocm_without_its_tool_is_unknown_and_with_it_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = driver(Hardware("gpu", 8))
    assert missing.state == "unknown"
    assert missing.fix
    (tmp_path / "rocm-smi").touch(mode=0o755)
    (found,) = driver(Hardware("gpu", 8))
    assert found.state == "ok"
    assert "7.2.0" in found.detail
    assert list(driver(Hardware("cpu"))) == []


def test_shared_memory_of_a_plain_pod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 64 * 2**20))
    found = module._shared(10**9)
    assert found.state == "wrong"
    assert "emptyDir" in found.fix
    assert module._shared(10**6).state == "ok"


def test_a_cancelled_rehearsal_is_a_cancellation_and_no_finding(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*_: object) -> Finding:
        raise TrainingCancelled("asked to stop")

    monkeypatch.setattr(module, "rehearse", cancelled)
    with pytest.raises(TrainingCancelled):
        list(examine(asked(bundle, tmp_path), Hardware("cpu", 2)))


def test_a_worker_of_several_ranks_rehearses_by_itself(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Finding(name="rehearsal", state="wrong", detail="it hung", fix="look")
    monkeypatch.setattr(module, "rehearse", lambda *_: tried)
    found = list(examine(asked(bundle, tmp_path), Hardware("cpu", 2)))
    assert found[-1] == tried
    with pytest.raises(TrainingError, match=r"cannot train: rehearsal: it hung \(look\)"):
        Preflight(findings=tuple(found)).check()
