"""The trainer port: local shards in, checkpoints out, and each checkpoint exported as a draft the engine can load.

A draft on disk is a folder: ``config.json`` and ``model.safetensors`` (SGLang's EAGLE3 format: d2t and t2d inside,
no embedding), named by the sha256 of the latter. Knows nothing of stores, flows or which checkpoint is best.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tide.domain import Record, TargetContract, TrainingConfig, TrainingProgress, Value
from tide.errors import TrainingError

ProgressCallback = Callable[[TrainingProgress], None]


class TrainingData(Record):
    """What a run trains on: local shard files, each with its manifest beside it, of the ``train`` split only."""

    shards: tuple[Path, ...]
    target: TargetContract
    prefer_newest: bool = True


class RefusedSample(Record):
    """One request left out of training, and why."""

    request: str
    reason: str


class Checkpoint(Value):
    """A saved state of the run, exported as a draft folder."""

    step: int
    draft: Path
    digest: str


class TrainingResult(Record):
    """What a run produced; which checkpoint is best is decided by a walk, elsewhere."""

    checkpoints: tuple[Checkpoint, ...]
    samples: int
    tokens: int
    refused: tuple[RefusedSample, ...]
    vocabulary_rechosen: bool
    coverage: float
    """Share of generated tokens inside the draft vocabulary that was trained."""
    final_loss: float
    seconds: float
    environment: dict[str, str]


class Finding(Value):
    """One check of a worker before it trains."""

    name: str
    state: Literal["ok", "wrong", "unknown"]
    """``unknown``: it could not be looked at; that alone does not refuse a run."""
    detail: str
    fix: str = ""


class Preflight(Record):
    """Whether a worker can do a run, found out before any data is loaded."""

    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What refuses the run; none when it can go on."""
        return tuple(finding for finding in self.findings if finding.state == "wrong")

    def check(self) -> None:
        """Raises TrainingError naming every finding that is wrong, and how to mend it."""
        if self.wrong:
            told = "; ".join(
                f"{f.name}: {f.detail} ({f.fix})" if f.fix else f"{f.name}: {f.detail}" for f in self.wrong
            )
            raise TrainingError(f"this worker cannot train: {told}")


class Trainer(ABC):
    """Trains drafts without ever loading the target model."""

    @abstractmethod
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
        """Train from a parent draft, or from scratch when there is none.

        Args:
            data: local shards of the ``train`` split.
            config: knobs of the run.
            parent: folder of the draft to start from; its own vocabulary map is always the one used.
            bundle: head-only target (config, embedding and lm_head tensors), see ``prepare_bundle``.
            workdir: scratch folder of this run alone; what runs there carries its mark (``tide.recovery.ownership``).
            on_progress: called for each logged step.

        Raises:
            ContractMismatch: shards, parent and bundle are not of one target.
            BadInputError: no usable sample is left.
            TrainingDiverged, TrainingStalled, TrainingCancelled, TrainingError.
        """

    @abstractmethod
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
        """Look at the worker before any data is loaded: devices, driver, disk, memory, bundle, and a few real steps.

        Args:
            target: what the states were captured of.
            tokens: rows that the run will train on.
            parent: folder of the draft to start from.
            workdir: where the run will have its scratch folder.
            rehearse: train three steps on made-up rows; None: when there are collectives or a GPU to try.
        """

    @abstractmethod
    def prepare_bundle(self, model: Path, destination: Path, dtype: str | None = None) -> Path:
        """Extract the head-only bundle from a target model folder; reused when it exists and matches.

        Args:
            dtype: what the engine computes in, when that is not what the model's configuration says.
        """
