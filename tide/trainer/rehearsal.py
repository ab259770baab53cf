"""A few real steps on made-up rows, before a run is given hours and data: do kernels compile, do collectives return?

Owns the made-up samples and the verdict. The steps are those of a run: SpecForge, every rank, the real length,
attention, batch and vocabulary; within a deadline.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

import torch

from tide.domain import ShardRequest, TargetContract, TrainingConfig
from tide.errors import TrainingCancelled, TrainingError, TrainingStalled
from tide.models.draft_files import DraftFiles
from tide.recovery.ownership import claim
from tide.states.shards import RequestStates
from tide.trainer.base import Finding
from tide.trainer.hardware import Hardware
from tide.trainer.rank import ONE
from tide.trainer.run import LOG, paths_of, run_specforge
from tide.trainer.run_config import Plan, RunPaths, shares
from tide.trainer.samples import SAMPLES_FOLDER, Cut, Samples, write_sample
from tide.trainer.start import choose_start, write_start

STEPS = 3
RANKS = 2
"""Ranks of a rehearsal on a CPU whose run would have one."""
NAME = "rehearsal"


def rehearse(
    config: TrainingConfig,
    target: TargetContract,
    parent: DraftFiles | None,
    bundle: Path,
    workdir: Path,
    hardware: Hardware,
) -> Finding:
    """Train ``STEPS`` steps on all ranks, on a CPU on two at least; nothing of it is left.

    Args:
        parent: the draft to start from, of the run's own shape; None: a first one.
        workdir: where the scratch folder goes.

    Raises:
        TrainingCancelled: it was asked to stop.
        DraftError, BadInputError: parent or bundle cannot be read.
        OSError: the disk refused.
    """
    at_once, accumulated = shares(config, hardware.ranks)
    ranks = max(RANKS, hardware.ranks) if hardware.kind == "cpu" else hardware.ranks
    hardware = Hardware(hardware.kind, ranks)
    limit = config.preflight.rehearsal_s
    config = config.model_copy(
        update={"epochs": 1, "max_steps": STEPS, "batch_size": at_once * accumulated * ranks, "no_progress_s": limit}
    )
    folder = workdir / f"{NAME}-{uuid.uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    try:
        mark = claim(folder).token
        return _steps(mark, config, target, parent, bundle.resolve(), folder.resolve(), hardware)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _steps(
    mark: str,
    config: TrainingConfig,
    target: TargetContract,
    parent: DraftFiles | None,
    bundle: Path,
    folder: Path,
    hardware: Hardware,
) -> Finding:
    at_once, accumulated = shares(config, hardware.ranks)
    paths, limit = paths_of(folder, bundle), config.preflight.rehearsal_s
    samples = made_up(paths, target, config, hardware, STEPS * config.batch_size)
    start = choose_start(parent, samples, config, bundle)
    write_start(start, paths.start, paths.mapping)
    plan = Plan(at_once, STEPS, 0, not bool(start.vocabulary.t2d.all()), accumulated)
    what = f"{hardware.ranks} ranks, {at_once} x {config.max_length} rows"
    started = time.monotonic()
    try:
        run_specforge(
            config,
            plan,
            paths,
            hardware,
            lambda _: None,
            mark=mark,
            first_step_s=limit,
            bad_steps=STEPS + 1,
            within_s=limit,
        )
        line = next((line for line in _log(folder).splitlines() if line.startswith(ONE)), None)
    except TrainingCancelled:
        raise
    except TrainingStalled as error:
        fix = "a collective or a compilation hangs: look at NCCL_DEBUG=INFO with `tide preflight --rehearse`"
        return Finding(name=NAME, state="wrong", detail=f"{what}: {error}", fix=fix)
    except TrainingError as error:
        return Finding(name=NAME, state="wrong", detail=f"{what}: {error}", fix="mend what the end of its log names")
    if line is None:
        detail = f"{what}: no rank said over which communicators it talks"
        return Finding(name=NAME, state="wrong", detail=detail, fix="look at tide/trainer/rank.py: SpecForge changed")
    took = time.monotonic() - started
    return Finding(name=NAME, state="ok", detail=f"{STEPS} steps of {what} in {took:.0f} s; {line.partition(': ')[2]}")


def _log(folder: Path) -> str:
    return (folder / LOG).read_text(errors="replace")


def made_up(paths: RunPaths, target: TargetContract, config: TrainingConfig, hardware: Hardware, count: int) -> Samples:
    """Samples of the longest length a run may have: one on disk, under as many names as are needed."""
    generator = torch.Generator().manual_seed(config.seed)
    rows, width = config.max_length, target.hidden_size
    states = RequestStates(
        info=ShardRequest(request=NAME, conversation=NAME, slice=NAME, draft="none"),
        input_ids=torch.randint(target.vocab_size, (rows,), generator=generator, dtype=torch.int32),
        last_token=0,
        first_row=0,
        prompt_len=1,
        aux_hidden=torch.randn((rows, 3 * width), generator=generator).bfloat16(),
        last_hidden=torch.randn((rows, width), generator=generator).bfloat16(),
    )
    zeros = torch.zeros(target.vocab_size, dtype=torch.int64)
    samples = Samples(paths.samples, zeros.clone(), zeros.clone())
    folder = paths.samples / SAMPLES_FOLDER
    folder.mkdir(parents=True)
    first = folder / "data_00000000.ckpt"
    write_sample(first, states, Cut(rows, rows, getattr(torch, hardware.dtype)), samples)
    for number in range(1, count):
        os.link(first, folder / f"data_{number:08d}.ckpt")
    return samples
