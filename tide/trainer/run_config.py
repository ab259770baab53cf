"""SpecForge's own configuration and environment for one run, on whatever this machine has.

Owns the translation of TrainingConfig into SpecForge's YAML, and what differs between a CPU and GPUs. Writes nothing
and starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tide.domain import TrainingConfig
from tide.trainer.specforge_cpu import PARENT

RUN_ID = "tide"
THREADS = "TIDE_TRAIN_THREADS"
"""Environment variable: CPU threads of a training process; 1 unless set."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Hardware:
    """What a run is given. The GPU side (CUDA or ROCm, which appears as CUDA) was never run by us."""

    kind: str
    """``cpu`` or ``gpu``."""
    ranks: int = 1
    """Data-parallel processes: one a GPU, on MI250 one a GCD."""

    @property
    def dtype(self) -> str:
        """What the draft computes in. float32 on a CPU: without bfloat16 instructions bfloat16 is 5 to 50 times slower,
        with them no faster at our sizes. Drafts are exported in bfloat16 either way."""
        return "bfloat16" if self.kind == "gpu" else "float32"

    @classmethod
    def detect(cls) -> Hardware:
        """All GPUs of this machine, or its CPU."""
        return cls("gpu", torch.cuda.device_count()) if torch.cuda.is_available() else cls("cpu")


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
    """Steps of a run."""

    batch_size: int
    """Samples a step and rank."""
    total_steps: int
    save_interval: int
    compact_teacher: bool = True
    """SpecForge refuses it for a draft that knows the target's whole vocabulary."""

    @classmethod
    def of(cls, config: TrainingConfig, samples: int, *, ranks: int = 1, compact_teacher: bool = True) -> Plan:
        """Whole batches only, as SpecForge drops the last partial one; checkpoints evenly spaced, the last at the end.

        Args:
            samples: at least one.
        """
        ranks = max(1, min(ranks, samples))
        batch = max(1, min(config.batch_size, samples // ranks))
        total = samples // (batch * ranks) * config.epochs
        total = total if config.max_steps is None else min(total, config.max_steps)
        return cls(batch, total, -(-total // config.checkpoints), compact_teacher)


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
        "training": _training(config, plan, gpu=gpu),
        "tracking": {"report_to": "none"},
        "run_id": RUN_ID,
        "output_dir": str(paths.output),
        "deployment": {
            "mode": "local_colocated",
            "trainer": {"nnodes": 1, "nproc_per_node": hardware.ranks},
        },
    }
    return yaml.safe_dump(content, sort_keys=False)


def _training(config: TrainingConfig, plan: Plan, *, gpu: bool) -> dict[str, Any]:
    own: dict[str, Any] = {
        "strategy": "eagle3",
        "num_epochs": config.epochs,
        "max_steps": plan.total_steps,
        "total_steps": plan.total_steps,
        "batch_size": plan.batch_size,
        "learning_rate": config.learning_rate,
        "warmup_ratio": 0.05,
        "max_grad_norm": 0.5,
        "ttt_length": config.ttt_length,
        # sdpa materialises S x S: fine at the lengths of a CPU run, not on a GPU at 2048 and more.
        "attention_backend": "flex_attention" if gpu else "sdpa",
        # The draft is small: replicate it.
        "fsdp_sharding": "NO_SHARD",
        "save_interval": plan.save_interval,
        "max_checkpoints": config.checkpoints + 1,
        "log_interval": 1,
        "seed": config.seed,
    }
    if plan.compact_teacher:
        # Keeps [B, S, V] float32 logits out of memory; exact. The shim computes it for supervised rows only.
        own |= {"compact_teacher": True, "compact_teacher_chunk_size": 16384}
    return own | ({"dist_timeout": 60} if gpu else {})


def command(hardware: Hardware, config: Path) -> list[str]:
    """The unmodified SpecForge command; through the shim on a CPU."""
    module = "specforge.cli" if hardware.kind == "gpu" else "tide.trainer.specforge_cpu"
    return [sys.executable, "-m", module, "train", "-c", str(config)]


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
    }
    if hardware.kind == "cpu":
        env |= {"SPECFORGE_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1", PARENT: str(os.getpid())}
    return env
