"""How a draft was trained, and what it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tide.domain.identity import Digest, DraftContract, Record, TargetContract, Value


class PreflightConfig(Record):
    """What a training worker must have before any data is loaded."""

    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a device's memory that the estimate of a run may take."""
    disk_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the free disk space that the run may take."""
    rehearsal_s: float = Field(default=600.0, gt=0)
    """Longest time for the rehearsal: three steps on every rank, start-up and compilation included."""


class TrainingConfig(Record):
    """Knobs of one training run, as given to SpecForge."""

    epochs: int = Field(default=2, ge=1)
    batch_size: int = Field(default=4, ge=1)
    """Samples of one optimizer step, over all ranks: it must divide among them."""
    device_batch_size: int | None = Field(default=None, ge=1)
    """Samples that one rank computes at once; fewer than its share of ``batch_size`` are accumulated. None: all."""
    ranks: int | None = Field(default=None, ge=1)
    """Data-parallel processes, ``TIDE_TRAIN_RANKS`` over it; None: one a GPU (on MI250 one a GCD), or one on a CPU."""
    attention_backend: Literal["sdpa", "flex_attention"] | None = None
    """None: ``flex_attention`` on GPUs, ``sdpa``, which materialises length x length scores, on a CPU."""
    no_progress_s: float = Field(default=300.0, gt=0)
    """Longest time between two steps; then the whole process group is ended."""
    learning_rate: float = Field(default=1e-3, gt=0, lt=1)
    ttt_length: int = Field(default=3, ge=1, le=16)
    max_length: int = Field(default=512, ge=16)
    prompt_rows: int = Field(default=64, ge=1)
    """Prompt rows kept before the generated ones."""
    max_steps: int | None = Field(default=None, ge=1)
    checkpoints: int = Field(default=3, ge=1)
    draft_vocab_size: int = Field(default=8192, ge=1)
    min_vocab_coverage: float = Field(default=0.95, ge=0, le=1)
    """Below this share of generated tokens inside the parent's draft vocabulary, the vocabulary is chosen anew."""
    seed: int = 0
    preflight: PreflightConfig = PreflightConfig()


class TrainingProgress(Record):
    """A moment of a training run."""

    step: int
    total_steps: int
    loss: float | None
    eta_s: float | None


class DraftModel(Value):
    """A draft and where it comes from."""

    schema_version: Literal[1] = 1
    digest: Digest
    """sha256 of ``model.safetensors``."""
    contract: DraftContract
    target: TargetContract
    parent: str | None = None
    states_repository: str | None = None
    states_commit: str | None = None
    """None for an imported draft: one that we did not train."""
    trained_tokens: int = 0
    trained_requests: int = 0
    steps: int = 0
    max_length: int = 0
    selection_acceptance_length: float | None = None
    policy: str | None = None
    seed: int | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    created_at: float = 0.0

    @property
    def imported(self) -> bool:
        """True when TIDE did not train it."""
        return self.states_commit is None
