"""What a run may use: ranks from the environment or the policy, and no silent step from GPUs down to a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tide.errors import ConfigError
from tide.trainer import hardware as module
from tide.trainer.hardware import DEVICE, RANKS, Hardware, device_memory


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without GPUs; returns where AMD's driver would be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "AMD_DRIVER", tmp_path / "kfd")
    return tmp_path / "kfd"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    """A machine with eight GCDs."""
    plain.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.usefixtures("plain")
def test_without_gpus_a_run_has_one_rank_on_the_cpu_or_as_many_as_are_asked_for() -> None:
    assert Hardware.detect(None, {}) == Hardware("cpu", 1)
    assert Hardware.detect(4, {}) == Hardware("cpu", 4)
    assert Hardware.detect(4, {RANKS: "2"}) == Hardware("cpu", 2)


@pytest.mark.usefixtures("node")
def test_a_node_has_one_rank_a_gcd_unless_fewer_are_asked_for() -> None:
    assert Hardware.detect(None, {}) == Hardware("gpu", 8)
    assert Hardware.detect(None, {RANKS: "4"}) == Hardware("gpu", 4)
    assert Hardware.detect(None, {DEVICE: "cpu"}) == Hardware("cpu", 1)
    with pytest.raises(ConfigError, match="9 ranks, but 8 GPUs"):
        Hardware.detect(9, {})


@pytest.mark.usefixtures("plain")
def test_where_gpus_are_insisted_on_there_is_no_run_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="TIDE_TRAIN_DEVICE is gpu, but torch sees no GPU"):
        Hardware.detect(None, {DEVICE: "gpu"})


def test_a_driver_without_a_gpu_in_torch_is_an_error_and_not_a_cpu(plain: Path) -> None:
    plain.touch()
    with pytest.raises(ConfigError, match="render and video"):
        Hardware.detect(None, {})
    assert Hardware.detect(None, {DEVICE: "cpu"}) == Hardware("cpu", 1)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
@pytest.mark.usefixtures("plain")
def test_ranks_that_are_no_number_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=RANKS):
        Hardware.detect(None, {RANKS: value})


@pytest.mark.usefixtures("plain")
def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="set gpu or cpu"):
        Hardware.detect(None, {DEVICE: "rocm"})


def test_the_memory_of_a_cpu_is_shared_by_its_ranks() -> None:
    one, four = device_memory(Hardware("cpu", 1)), device_memory(Hardware("cpu", 4))
    assert one is not None
    assert four is not None
    assert one / four == pytest.approx(4, rel=0.2)


def test_unreadable_memory_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "none")
    assert device_memory(Hardware("cpu")) is None
