"""The trainer port on SpecForge: its unmodified command as a subprocess, on sample files made for one run.

Owns the order of a run: identities, samples, start, process, export. Every run has a folder of its own, caches
included, so that two runs at once, or the remains of another, cannot meet. Knows nothing of stores or flows.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tide.domain import TargetContract, TrainingConfig
from tide.errors import BadInputError, ContractMismatch
from tide.models.draft_files import load_draft
from tide.models.target_files import bundle_contract, eagle3_layers, read_config, target_contract
from tide.recovery.ownership import claim
from tide.trainer.base import Preflight, ProgressCallback, Trainer, TrainingData, TrainingResult
from tide.trainer.bundle import write_bundle
from tide.trainer.export import export_checkpoints
from tide.trainer.hardware import Hardware
from tide.trainer.preflight import Asked, examine
from tide.trainer.run import clean, paths_of, run_specforge
from tide.trainer.run_config import RUN_ID, THREADS, Plan, RunPaths, shares
from tide.trainer.samples import Cut, Samples, materialise
from tide.trainer.start import Start, check_parent, choose_start, write_start

_PACKAGES = ("specforge", "torch", "transformers")


class SpecForgeTrainer(Trainer):
    """SpecForge 0.2.0, on a CPU or on all GPUs of this machine.

    Args:
        first_step_s: longest time from the start to the first step, seconds; never less than between two steps.
        bad_steps: so many steps in a row with loss 0 or not finite stop the run.
        hardware: what to train on; found out when None.
    """

    def __init__(
        self,
        *,
        first_step_s: float = 900.0,
        bad_steps: int = 5,
        hardware: Hardware | None = None,
    ) -> None:
        self._first_step_s, self._bad_steps = first_step_s, bad_steps
        self._hardware = hardware

    def prepare_bundle(self, model: Path, destination: Path, dtype: str | None = None) -> Path:
        """See the port. The contract is that of EAGLE3's usual three layers."""
        config = read_config(model)
        dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return write_bundle(model, destination, target_contract(model, eagle3_layers(model), dtype))

    def train(
        self,
        data: TrainingData,
        config: TrainingConfig,
        *,
        parent: Path | None,
        bundle: Path,
        workdir: Path,
        on_progress: ProgressCallback,
    ) -> TrainingResult:
        """See the port. Drafts go to ``workdir/drafts/<sha256>``; logs and configuration stay in ``workdir/run-*``."""
        started = time.monotonic()
        draft = None if parent is None else load_draft(parent)
        if parts := bundle_contract(bundle).differences(data.target):
            raise ContractMismatch("target (bundle and training data)", parts)
        if draft is not None:
            check_parent(draft, data.target)
        hardware = self._hardware or Hardware.of(config)
        shares(config, hardware.ranks)  # before any data is read
        environment_facts = _environment_facts(hardware)
        workdir.mkdir(parents=True, exist_ok=True)
        mark = claim(workdir).token
        run = Path(tempfile.mkdtemp(prefix="run-", dir=workdir.resolve()))
        paths = paths_of(run, bundle.resolve())
        try:
            samples = materialise(
                data.shards,
                paths.samples,
                target=data.target,
                cut=Cut(config.prompt_rows, config.max_length, getattr(torch, hardware.dtype)),
                newest=_newest(data, config),
            )
            start = choose_start(draft, samples, config, bundle)
            write_start(start, paths.start, paths.mapping)
            loss = self._steps(config, samples, start, paths, hardware, on_progress, mark)
            checkpoints = export_checkpoints(
                paths.output, RUN_ID, workdir / "drafts", config=start.config, mapping=paths.mapping
            )
        finally:
            clean(paths)
        return TrainingResult(
            checkpoints=checkpoints,
            **_data_facts(samples, start),
            final_loss=loss,
            seconds=time.monotonic() - started,
            environment=environment_facts,
        )

    def preflight(
        self,
        config: TrainingConfig,
        *,
        target: TargetContract,
        tokens: int,
        parent: Path | None,
        bundle: Path,
        workdir: Path,
        rehearse: bool | None = None,
    ) -> Preflight:
        """See the port."""
        asked = Asked(config, target, tokens, parent, bundle, workdir, rehearse)
        return Preflight(findings=tuple(examine(asked, self._hardware)))

    def _steps(
        self,
        config: TrainingConfig,
        samples: Samples,
        start: Start,
        paths: RunPaths,
        hardware: Hardware,
        on_progress: ProgressCallback,
        mark: str,
    ) -> float:
        """Train; returns the last loss."""
        plan = Plan.of(
            config, samples.count, ranks=hardware.ranks, compact_teacher=not bool(start.vocabulary.t2d.all())
        )
        return run_specforge(
            config,
            plan,
            paths,
            hardware,
            on_progress,
            mark=mark,
            first_step_s=max(self._first_step_s, config.no_progress_s),
            bad_steps=self._bad_steps,
        )


def _newest(data: TrainingData, config: TrainingConfig) -> int | None:
    """With fewer steps than there are samples, the newest requests are the ones to train on."""
    if not data.prefer_newest or config.max_steps is None:
        return None
    return config.max_steps * config.batch_size


def _data_facts(samples: Samples, start: Start) -> dict[str, object]:
    return {
        "samples": samples.count,
        "tokens": samples.tokens,
        "refused": tuple(samples.refused),
        "vocabulary_rechosen": start.rechosen,
        "coverage": start.coverage,
    }


def _environment_facts(hardware: Hardware) -> dict[str, str]:
    facts = {
        "python": platform.python_version(),
        "device": hardware.kind,
        "ranks": str(hardware.ranks),
        "threads": os.environ.get(THREADS, "1"),
        "machine": platform.machine(),
    }
    if torch.version.hip:
        facts["rocm"] = str(torch.version.hip)
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError as error:
            raise BadInputError(f"{package} is not installed in {sys.executable}: install the extra `train`") from error
    return facts
