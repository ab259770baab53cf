"""What a training run may use of this machine: its devices, the ranks on them, and their memory.

Owns how devices are found and how the number of ranks is decided. There is no silent step from GPUs down to a CPU:
where GPUs are expected (``TIDE_TRAIN_DEVICE``, or AMD's driver is there), their absence is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tide.domain import TrainingConfig
from tide.errors import ConfigError

RANKS = "TIDE_TRAIN_RANKS"
"""Environment variable: data-parallel processes, over what the policy says."""
DEVICE = "TIDE_TRAIN_DEVICE"
"""Environment variable: ``gpu`` or ``cpu``; unset takes the GPUs that torch sees, else the CPU."""
AMD_DRIVER = Path("/dev/kfd")
"""The compute device of AMD's kernel driver."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Hardware:
    """What a run is given. The GPU side (CUDA or ROCm, which appears as CUDA) was never run by us."""

    kind: str
    """``cpu`` or ``gpu``."""
    ranks: int = 1
    """Data-parallel processes: one a GPU, on MI250 one a GCD; on a CPU as many as are asked for."""

    @property
    def dtype(self) -> str:
        """What the draft computes in. float32 on a CPU: without bfloat16 instructions bfloat16 is 5 to 50 times slower,
        with them no faster at our sizes. Drafts are exported in bfloat16 either way."""
        return "bfloat16" if self.kind == "gpu" else "float32"

    @property
    def backend(self) -> str:
        """Attention that is used unless the policy names one."""
        return "flex_attention" if self.kind == "gpu" else "sdpa"

    @classmethod
    def detect(cls, wanted: int | None = None, env: Mapping[str, str] = os.environ) -> Hardware:
        """The GPUs of this machine, or its CPU.

        Args:
            wanted: ranks that the policy asks for; None: one a GPU, or one on a CPU.

        Raises:
            ConfigError: GPUs are expected and torch sees none, or there are fewer than ranks.
        """
        ranks = _ranks(env) or wanted
        device = env.get(DEVICE) or "auto"
        if device not in {"auto", "cpu", "gpu"}:
            raise ConfigError(f"{DEVICE} is {device!r}: set gpu or cpu, or leave it unset")
        if device == "cpu" or (device == "auto" and not torch.cuda.is_available() and not AMD_DRIVER.exists()):
            return cls("cpu", ranks or 1)
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not devices:
            raise ConfigError(_no_gpu(device))
        if ranks is not None and ranks > devices:
            raise ConfigError(f"{ranks} ranks, but {devices} GPUs: set {RANKS} or train.ranks to {devices} or less")
        return cls("gpu", ranks or devices)

    @classmethod
    def of(cls, config: TrainingConfig) -> Hardware:
        """``detect`` with the ranks of a configuration."""
        return cls.detect(config.ranks)


def device_memory(hardware: Hardware) -> int | None:
    """Bytes that one rank may use: the smallest of the devices, or the CPU's available memory shared by the ranks.

    None when it cannot be read.
    """
    if hardware.kind == "gpu":
        return min(torch.cuda.get_device_properties(i).total_memory for i in range(hardware.ranks))
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024 // hardware.ranks
    except (OSError, KeyError, ValueError):
        return None


def _ranks(env: Mapping[str, str]) -> int | None:
    value = env.get(RANKS, "")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{RANKS} is {value!r}: set a number of processes from 1 on, or leave it unset")
    return int(value)


def _no_gpu(device: str) -> str:
    why = f"{DEVICE} is gpu" if device == "gpu" else f"{AMD_DRIVER} is there"
    built = f"it was built for ROCm {torch.version.hip}" if torch.version.hip else "it was not built for ROCm"
    return (
        f"{why}, but torch sees no GPU ({built}): install torch for ROCm, and give this user {AMD_DRIVER} and /dev/dri "
        f"(groups render and video); to train on the CPU nevertheless set {DEVICE}=cpu"
    )
