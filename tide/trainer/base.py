"""The trainer port: local shards in, checkpoints out, and each checkpoint exported as a draft the engine can load.

A draft on disk is a folder: ``config.json`` and ``model.safetensors`` (SGLang's EAGLE3 format: d2t and t2d inside,
no embedding), named by the sha256 of the latter. Knows nothing of stores, flows or which checkpoint is best.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tide.domain import Record, TargetContract, TrainingConfig, TrainingProgress, Value

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
            workdir: scratch folder of this run alone.
            on_progress: called for each logged step.

        Raises:
            ContractMismatch: shards, parent and bundle are not of one target.
            BadInputError: no usable sample is left.
            TrainingDiverged, TrainingStalled, TrainingCancelled, TrainingError.
        """

    @abstractmethod
    def prepare_bundle(self, model: Path, destination: Path, dtype: str | None = None) -> Path:
        """Extract the head-only bundle from a target model folder; reused when it exists and matches.

        Args:
            dtype: what the engine computes in, when that is not what the model's configuration says.
        """
