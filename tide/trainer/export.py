"""SpecForge's checkpoints as drafts that the engine can load.

Owns finding the complete checkpoints of a run and publishing each as a draft folder named by its digest. Only called
after a run has ended well: a checkpoint that was being written when the run died is never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tide.errors import TrainingError
from tide.models.draft_files import write_draft
from tide.trainer.base import Checkpoint
from tide.trainer.vocabulary import check_mapping

_STATE = "training_state.pt"


def export_checkpoints(
    output: Path, run_id: str, drafts: Path, *, config: Mapping[str, Any], mapping: Path
) -> tuple[Checkpoint, ...]:
    """Export every checkpoint of a run, earliest first.

    Args:
        output: SpecForge's output folder.
        drafts: where ``<sha256>/`` folders go.
        config: content of each draft's ``config.json``.
        mapping: the vocabulary map the run was given; each checkpoint must still carry it.

    Raises:
        TrainingError: no checkpoint, or one without its state.
        DraftError: weights that are not a draft, or not finite.
        ContractMismatch: the vocabulary map changed during the run.
    """
    found = sorted(
        (int(match[1]), path)
        for path in output.glob(f"{run_id}-step*")
        if (match := re.fullmatch(rf"{re.escape(run_id)}-step(\d+)", path.name))
    )
    if not found:
        raise TrainingError(f"training: ended without a checkpoint under {output}")
    exported = []
    for step, path in found:
        tensors = _draft_tensors(path)
        check_mapping(mapping, tensors, int(config["vocab_size"]))
        folder, digest = write_draft(drafts, config, tensors)
        exported.append(Checkpoint(step=step, draft=folder, digest=digest))
    return tuple(exported)


def _draft_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The draft's own tensors, bfloat16; the embedding is the target's and is left out."""
    path = checkpoint / _STATE
    if not path.exists():
        raise TrainingError(f"training: checkpoint {checkpoint} is incomplete: no {_STATE}")
    state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)["draft_state_dict"]
    own = {name: tensor for name, tensor in state.items() if "embed" not in name}
    return {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in own.items()}
