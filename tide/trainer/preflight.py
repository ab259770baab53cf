"""What is looked at on a training worker before any data is loaded.

Owns the checks and their order: devices, driver, batch, bundle, disk, memory, and a rehearsal. Each stands alone: one
that cannot be made says so and the others go on. Reads only, but for the rehearsal's scratch folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tide.domain import DraftContract, TargetContract, TrainingConfig
from tide.errors import ConfigError, TideError, TrainingCancelled
from tide.models.draft_files import load_draft
from tide.models.draft_format import read_contract
from tide.models.target_files import bundle_contract, head_keys, tensor_shape
from tide.trainer.base import Finding
from tide.trainer.hardware import DEVICE, Hardware, device_memory
from tide.trainer.initial import draft_config
from tide.trainer.memory import disk_bytes, shared_memory_bytes, training_memory
from tide.trainer.rehearsal import rehearse
from tide.trainer.run_config import shares
from tide.trainer.vocabulary import Vocabulary

SHARED_MEMORY = Path("/dev/shm")
_TOOLS = ("amd-smi", "rocm-smi")
_GB = 1e9


@dataclass(frozen=True)
class Asked:
    """The run that a worker is looked at for."""

    config: TrainingConfig
    target: TargetContract
    tokens: int
    parent: Path | None
    bundle: Path
    workdir: Path
    rehearse: bool | None = None
    """None: when there are collectives or a GPU to try."""


def examine(asked: Asked, hardware: Hardware | None = None) -> Iterator[Finding]:
    """Every check, in the order in which to mend what they find; a rehearsal only when nothing is wrong before it.

    Args:
        hardware: what to train on; found out when None.
    """
    try:
        hardware = hardware or Hardware.of(asked.config)
    except ConfigError as error:
        yield Finding(name="devices", state="wrong", detail=str(error))
        yield from _guard("target bundle", lambda: _bundle(asked))
        return
    found = [_devices(hardware), *driver(hardware)]
    found += _guard("batch", lambda: _batch(asked.config, hardware))
    found += _guard("target bundle", lambda: _bundle(asked))
    if not any(finding.state == "wrong" for finding in found):
        found += _guard("room", lambda: _room(asked, hardware))
    yield from found
    if not any(finding.state == "wrong" for finding in found):
        yield from _guard("rehearsal", lambda: _rehearsal(asked, hardware))


def _guard(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except ConfigError as error:
        return [Finding(name=name, state="wrong", detail=str(error))]
    except TrainingCancelled:
        raise
    except TideError as error:
        return [Finding(name=name, state="wrong", detail=str(error), fix="mend this first, then run it again")]
    except OSError as error:
        return [Finding(name=name, state="unknown", detail=f"could not be looked at: {error}")]


def _devices(hardware: Hardware) -> Finding:
    if hardware.kind == "cpu":
        ranks = "1 rank" if hardware.ranks == 1 else f"{hardware.ranks} gloo ranks"
        detail = f"no GPU is used: {ranks} on the CPU, float32 (set {DEVICE}=gpu to insist on GPUs)"
        return Finding(name="devices", state="ok", detail=detail)
    names = sorted({_device_name(i) for i in range(hardware.ranks)})
    detail = f"{hardware.ranks} of {torch.cuda.device_count()} GPUs, one rank each: {', '.join(names)}"
    return Finding(name="devices", state="ok", detail=detail)


def _device_name(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name} {getattr(properties, 'gcnArchName', '')}".strip()


def driver(hardware: Hardware) -> Iterator[Finding]:
    """Whether ROCm is what torch was built for, and its tool is there to look at the devices with."""
    if hardware.kind == "cpu":
        return
    if not torch.version.hip:
        yield Finding(name="driver", state="ok", detail=f"CUDA {torch.version.cuda}, not ROCm")
        return
    tool = next((found for name in _TOOLS if (found := shutil.which(name))), None)
    if tool is None:
        yield Finding(
            name="driver",
            state="unknown",
            detail=f"torch for ROCm {torch.version.hip}; neither {' nor '.join(_TOOLS)} is on PATH",
            fix="install the tools of that ROCm: without them nobody sees a device's errors, memory or heat",
        )
        return
    yield Finding(name="driver", state="ok", detail=f"torch for ROCm {torch.version.hip}, {tool}")


def _batch(config: TrainingConfig, hardware: Hardware) -> Iterator[Finding]:
    at_once, accumulated = shares(config, hardware.ranks)
    detail = f"{config.batch_size} samples a step: {hardware.ranks} ranks x {at_once} at once x {accumulated}"
    yield Finding(name="batch", state="ok", detail=detail)


def _bundle(asked: Asked) -> Iterator[Finding]:
    found, name = bundle_contract(asked.bundle), "target bundle"
    if parts := asked.target.differences(found):
        fix = "ship the bundle of the target that these states were captured of, and set TIDE_TARGET_BUNDLE"
        yield Finding(name=name, state="wrong", detail=f"of another target: {'; '.join(parts)}", fix=fix)
        return
    wanted = (found.vocab_size, found.hidden_size)
    for key in dict.fromkeys(head_keys(asked.bundle)):
        shape = tensor_shape(asked.bundle, key)
        if shape != wanted:
            detail = f"{key} is {shape}, not {wanted}"
            yield Finding(name=name, state="wrong", detail=detail, fix="cut it again: `tide up`, or prepare_bundle")
            return
    yield Finding(name=name, state="ok", detail=f"{asked.bundle}, weights {found.weights[:12]}")


def contract_of(asked: Asked) -> DraftContract:
    """Shape of the draft that will be trained: the parent's, or that of a first one.

    Raises:
        DraftError, BadInputError: the parent, or the bundle's configuration, cannot be read.
    """
    if asked.parent is not None:
        return load_draft(asked.parent).contract
    config = draft_config(asked.bundle, asked.target.aux_layers, asked.config.draft_vocab_size)
    return read_contract(config, Vocabulary.of_low_ids(config["draft_vocab_size"], config["vocab_size"]).d2t)


def _room(asked: Asked, hardware: Hardware) -> Iterator[Finding]:
    contract, config = contract_of(asked), asked.config
    width = 2 if hardware.dtype == "bfloat16" else 4
    at_once, _ = shares(config, hardware.ranks)
    needed = disk_bytes(contract, tokens=asked.tokens, checkpoints=config.checkpoints, width=width)
    yield _disk(asked.workdir, needed, config.preflight.disk_share)
    if hardware.kind == "gpu":
        hidden = contract.target_hidden_size
        yield _shared(
            shared_memory_bytes(hidden, length=config.max_length, batch=at_once, ranks=hardware.ranks, width=width)
        )
    yield memory(contract, config, hardware, device_memory(hardware))


def _disk(workdir: Path, needed: int, share: float) -> Finding:
    workdir = workdir.absolute()
    folder = next(path for path in (workdir, *workdir.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    detail = f"{needed / _GB:.1f} GB are needed, {free / _GB:.1f} GB are free in {folder}"
    if needed <= free * share:
        return Finding(name="disk", state="ok", detail=detail)
    fix = "give the worker more scratch (TIDE_HOME), or lower train_tokens or train.checkpoints in the policy"
    return Finding(name="disk", state="wrong", detail=detail, fix=fix)


def _shared(needed: int) -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    detail = f"{needed / _GB:.2f} GB are needed for data loaders, {free / _GB:.2f} GB are free in {SHARED_MEMORY}"
    if needed <= free:
        return Finding(name="shared memory", state="ok", detail=detail)
    fix = (
        "mount a larger one: an emptyDir of medium Memory in Kubernetes (the pool's shared_memory), Docker's --shm-size"
    )
    return Finding(name="shared memory", state="wrong", detail=detail, fix=fix)


def memory(contract: DraftContract, config: TrainingConfig, hardware: Hardware, limit: int | None) -> Finding:
    """Whether length, attention and batch fit a device's memory.

    Args:
        limit: bytes that one rank may use; None when nobody knows.
    """
    at_once, _ = shares(config, hardware.ranks)
    backend = config.attention_backend or hardware.backend
    needs = training_memory(
        contract,
        length=config.max_length,
        batch=at_once,
        ttt_length=config.ttt_length,
        backend=backend,
        width=2 if hardware.dtype == "bfloat16" else 4,
    )
    what = f"{at_once} x {config.max_length} rows with {backend} need about {needs.total / _GB:.1f} GB a rank"
    if needs.scores:
        what += f", {needs.scores / _GB:.1f} GB of it for attention scores"
    if limit is None:
        return Finding(name="memory", state="unknown", detail=f"{what}; how much there is cannot be read")
    what += f"; there are {limit / _GB:.1f} GB"
    if needs.total <= limit * config.preflight.memory_share:
        return Finding(name="memory", state="ok", detail=what)
    ways = ["lower train.device_batch_size or train.max_length"]
    if backend == "sdpa" and hardware.kind == "gpu":
        ways.insert(0, "set train.attention_backend to flex_attention, which materialises no scores")
    return Finding(name="memory", state="wrong", detail=what, fix=", or ".join(ways))


def _rehearsal(asked: Asked, hardware: Hardware) -> Iterator[Finding]:
    wanted = asked.rehearse if asked.rehearse is not None else hardware.kind == "gpu" or hardware.ranks > 1
    if not wanted:
        detail = "one rank on a CPU: there is no collective and no kernel to try"
        yield Finding(name="rehearsal", state="ok", detail=detail)
        return
    parent = None if asked.parent is None else load_draft(asked.parent)
    yield rehearse(asked.config, asked.target, parent, asked.bundle, asked.workdir, hardware)
