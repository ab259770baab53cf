"""One run of SpecForge's command from its files to its end: written, started, watched, ended.

Owns where a run's files lie and what is left of them. Knows nothing of shards, drafts to export, stores or flows.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tide.domain import TrainingConfig
from tide.errors import TrainingStalled
from tide.models.target_files import head_keys
from tide.trainer.base import ProgressCallback
from tide.trainer.hardware import Hardware
from tide.trainer.process import GroupProcess, sigterm_cancels
from tide.trainer.progress import Watch, follow
from tide.trainer.run_config import Plan, RunPaths, command, environment, specforge_yaml
from tide.trainer.start import check_start

LOG = "specforge.log"


def paths_of(run: Path, bundle: Path) -> RunPaths:
    """Where a run in a folder of its own reads and writes."""
    return RunPaths(
        bundle=bundle,
        start=run / "start",
        mapping=run / "vocab_mapping.pt",
        samples=run / "samples",
        cache=run / "cache",
        output=run / "output",
    )


def run_specforge(
    config: TrainingConfig,
    plan: Plan,
    paths: RunPaths,
    hardware: Hardware,
    on_progress: ProgressCallback,
    *,
    mark: str,
    first_step_s: float,
    bad_steps: int,
    within_s: float | None = None,
) -> float:
    """Run it to its end; returns the last loss. Whatever happens, no process of it is left.

    Args:
        mark: token of the run's owner (tide.recovery.ownership).
        first_step_s: longest time to the first step.
        bad_steps: so many steps in a row with loss 0 or not finite stop it.
        within_s: longest time for the whole run; None: as long as it steps.

    Raises:
        DraftError, ContractMismatch: the vocabulary map is not the draft's own.
        TrainingDiverged, TrainingStalled, TrainingCancelled, TrainingError.
    """
    run = paths.output.parent
    file = run / "specforge.yaml"
    file.write_text(specforge_yaml(config, plan, paths, hardware, head_keys(paths.bundle)))
    check_start(paths.start, paths.mapping)
    started = time.monotonic()
    with (
        sigterm_cancels(),
        GroupProcess(
            command(hardware, file), mark=mark, env=environment(hardware, os.environ), log=run / LOG, cwd=run
        ) as process,
    ):
        watch = Watch(
            plan.total_steps, started, first_step_s=first_step_s, step_s=config.no_progress_s, bad_steps=bad_steps
        )
        follow(_timed(process.lines(), watch, started, within_s), watch, time.monotonic, on_progress)
        process.check_exit()
    return watch.loss


def clean(paths: RunPaths) -> None:
    """Samples are pickle and checkpoints hold optimizer states: neither is kept, whatever the outcome."""
    for folder in (paths.samples, paths.output, paths.start, paths.cache):
        shutil.rmtree(folder, ignore_errors=True)


def _timed(lines: Iterator[str | None], watch: Watch, started: float, within_s: float | None) -> Iterator[str | None]:
    for line in lines:
        if within_s is not None and time.monotonic() - started > within_s:
            raise TrainingStalled(f"training: at step {watch.step} of {watch.total_steps} after {within_s:.0f} s")
        yield line
