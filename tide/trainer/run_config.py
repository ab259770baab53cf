"""SpecForge's own configuration and environment for one run, on whatever this machine has.

Owns the translation of TrainingConfig into SpecForge's YAML, how a batch is shared out among ranks, and what differs
between a CPU and GPUs. Writes nothing and starts nothing.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tide.domain import TrainingConfig
from tide.errors import ConfigError
from tide.trainer.binding import PARENT
from tide.trainer.hardware import Hardware

RUN_ID = "tide"
THREADS = "TIDE_TRAIN_THREADS"
"""Environment variable: CPU threads of a training process; 1 unless set."""
_ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All ranks are on this machine: they find each other over loopback, whatever its network is."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RunPaths:
    """Where one run reads and writes; all of it is this run's alone."""

    bundle: Path
    start: Path
    """Draft folder that training starts from."""
    mapping: Path
    samples: Path
    cache: Path
    output: Path


@dataclass(frozen=True)
class Plan:
    """Steps of a run, and how each is shared out."""

    batch_size: int
    """Samples that a rank computes at once."""
    total_steps: int
    """Optimizer steps."""
    save_interval: int
    compact_teacher: bool = True
    """SpecForge refuses it for a draft that knows the target's whole vocabulary."""
    accumulation: int = 1
    """Batches of a rank that make one optimizer step."""

    @classmethod
    def of(cls, config: TrainingConfig, samples: int, *, ranks: int = 1, compact_teacher: bool = True) -> Plan:
        """Whole batches only, as SpecForge drops the last partial one; checkpoints evenly spaced, the last at the end.

        An optimizer step takes ``config.batch_size`` samples however many ranks there are, unless there are fewer
        samples than that. Each rank gets its share of every epoch, the same number for all: SpecForge repeats a few
        samples where they do not divide.

        Args:
            samples: at least one.

        Raises:
            ConfigError: the batch does not divide among ranks, or a rank's share not into what it computes at once.
        """
        batch, accumulation = shares(config, ranks)
        rows = -(-samples // ranks)
        batch = min(batch, rows)
        batches = rows // batch * config.epochs
        accumulation = min(accumulation, batches)
        total = batches // accumulation
        total = total if config.max_steps is None else min(total, config.max_steps)
        return cls(batch, total, -(-total // config.checkpoints), compact_teacher, accumulation)


def shares(config: TrainingConfig, ranks: int) -> tuple[int, int]:
    """(samples a rank computes at once, how often it does so for one optimizer step).

    Raises:
        ConfigError: the batch does not divide among the ranks, or a rank's share not into what it computes at once.
    """
    share, rest = divmod(config.batch_size, ranks)
    if rest:
        raise ConfigError(
            f"train.batch_size is {config.batch_size}, which does not divide among {ranks} ranks: set it to a multiple "
            f"of {ranks}, or train.ranks (TIDE_TRAIN_RANKS) to a divisor of {config.batch_size}"
        )
    at_once = min(config.device_batch_size or share, share)
    if share % at_once:
        raise ConfigError(
            f"train.device_batch_size is {at_once}, which does not divide a rank's share of {share} samples a step: "
            f"set it to a divisor of {share}"
        )
    return at_once, share // at_once


def specforge_yaml(
    config: TrainingConfig, plan: Plan, paths: RunPaths, hardware: Hardware, keys: tuple[str, str]
) -> str:
    """The run's YAML.

    Args:
        keys: names of the embedding and of the lm_head tensor in the bundle; the same twice when tied.
    """
    embedding, head = keys
    gpu = hardware.kind == "gpu"
    content: dict[str, Any] = {
        "model": {
            "target_model_path": str(paths.bundle),
            "draft_model_config": str(paths.start / "config.json"),
            "draft_checkpoint_path": str(paths.start),
            # Never left to SpecForge: it would derive another map from the data, or take one from a cache.
            "vocab_mapping_path": str(paths.mapping),
            "embedding_key": embedding,
            "lm_head_key": head,
            "torch_dtype": hardware.dtype,
        },
        "data": {
            "hidden_states_path": str(paths.samples),
            "max_length": config.max_length,
            "cache_dir": str(paths.cache),
            "dataloader_num_workers": 4 if gpu else 0,
        },
        "training": _training(config, plan, hardware),
        "tracking": {"report_to": "none"},
        "run_id": RUN_ID,
        "output_dir": str(paths.output),
        "deployment": {
            "mode": "local_colocated",
            "trainer": {"nnodes": 1, "nproc_per_node": hardware.ranks},
        },
    }
    return yaml.safe_dump(content, sort_keys=False)


def _training(config: TrainingConfig, plan: Plan, hardware: Hardware) -> dict[str, Any]:
    own: dict[str, Any] = {
        "strategy": "eagle3",
        "num_epochs": config.epochs,
        "max_steps": plan.total_steps,
        "total_steps": plan.total_steps,
        "batch_size": plan.batch_size,
        "accumulation_steps": plan.accumulation,
        "learning_rate": config.learning_rate,
        "warmup_ratio": 0.05,
        "max_grad_norm": 0.5,
        "ttt_length": config.ttt_length,
        "attention_backend": config.attention_backend or hardware.backend,
        # The draft is small (gpt-oss-120b's takes 5 GB with its optimizer): replicate it. It also means one all-reduce
        # a step, over the default group alone.
        "fsdp_sharding": "NO_SHARD",
        "save_interval": plan.save_interval,
        "max_checkpoints": config.checkpoints + 1,
        "log_interval": 1,
        "seed": config.seed,
    }
    if plan.compact_teacher:
        # Keeps [B, S, V] float32 logits out of memory; exact. The shim computes it for supervised rows only.
        own |= {"compact_teacher": True, "compact_teacher_chunk_size": 16384}
    # Minutes. Longer than our own watch on the steps, which ends the whole group and says at which step it hung.
    return own | {"dist_timeout": max(60, 2 * math.ceil(config.no_progress_s / 60))}


def command(hardware: Hardware, config: Path) -> list[str]:
    """The unmodified SpecForge command: one process, or torchrun with one process a rank."""
    rank = ["tide.trainer.rank", "train", "-c", str(config)]
    if hardware.ranks == 1:
        return [sys.executable, "-m", *rank]
    launcher = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(hardware.ranks), "--module"]
    return [sys.executable, "-m", "tide.trainer.torchrun", *launcher, *rank]


def environment(hardware: Hardware, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the training process: the caller's, offline, without a rendezvous of somebody else's."""
    env = {key: value for key, value in base.items() if key not in _RENDEZVOUS}
    threads = base.get(THREADS, "1")
    package_root = str(Path(__file__).parents[2])
    env |= {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, base.get("PYTHONPATH")])),
        PARENT: str(os.getpid()),
        **_ONE_NODE,
    }
    if hardware.kind == "cpu":
        env |= {"SPECFORGE_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    return env
