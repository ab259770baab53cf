"""What a run starts from: a parent draft, the same draft under a new vocabulary, or fresh weights.

Owns that decision and the folder SpecForge warm-starts from, with a vocabulary map proven to be the draft's own.
Knows nothing of shards or processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tide.domain import TargetContract, TrainingConfig
from tide.errors import ContractMismatch
from tide.models.draft_files import DraftFiles
from tide.models.target_files import bundle_contract, head_keys, load_tensor
from tide.trainer.initial import draft_config, initial_tensors
from tide.trainer.samples import Samples
from tide.trainer.vocabulary import (
    Vocabulary,
    check_mapping,
    choose_vocabulary,
    coverage,
    reindex,
    write_mapping,
)

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Start:
    """Weights and configuration before step 1."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    vocabulary: Vocabulary
    coverage: float
    """Share of the run's generated tokens inside the vocabulary."""
    rechosen: bool
    """The parent's vocabulary was replaced: a new draft contract."""


def check_parent(parent: DraftFiles, target: TargetContract) -> None:
    """Refuse a parent that was made for another target.

    Raises:
        ContractMismatch: names the part.
    """
    if parent.record is not None and (parts := target.differences(parent.record.target)):
        raise ContractMismatch(f"target (training run and parent draft {parent.digest[:12]})", parts)
    own = parent.contract
    pairs = (
        ("aux_layers", target.aux_layers, own.aux_layers),
        ("target_hidden_size", target.hidden_size, own.target_hidden_size),
        ("vocab_size", target.vocab_size, own.vocab_size),
    )
    if parts := tuple(f"{name}: {wanted} != {found}" for name, wanted, found in pairs if wanted != found):
        raise ContractMismatch(f"target (training run and parent draft {parent.digest[:12]})", parts)


def choose_start(parent: DraftFiles | None, samples: Samples, config: TrainingConfig, bundle: Path) -> Start:
    """The parent as it is while its vocabulary covers the traffic; else re-indexed; fresh when there is no parent.

    Args:
        samples: for their token counts.
        bundle: head-only target bundle.
    """
    if parent is None:
        return _fresh(samples, config, bundle)
    known = Vocabulary.of_draft(parent.tensors, parent.contract.vocab_size)
    covered = coverage(known, samples.generated)
    if covered >= config.min_vocab_coverage:
        return Start(parent.config, parent.tensors, known, covered, rechosen=False)
    # The parent's size is kept: a draft of other shapes could not be swapped into a running engine.
    chosen = choose_vocabulary(samples.seen, samples.generated, parent.contract.draft_vocab_size)
    tensors = reindex(parent.tensors, chosen, load_tensor(bundle, head_keys(bundle)[1]))
    return Start(parent.config, tensors, chosen, coverage(chosen, samples.generated), rechosen=True)


def write_start(start: Start, folder: Path, mapping: Path) -> None:
    """Write what SpecForge warm-starts from, and its vocabulary map; then prove that they belong together.

    Args:
        folder: fresh; gets ``config.json`` and ``model.safetensors`` without an embedding.
        mapping: file for the map.

    Raises:
        DraftError, ContractMismatch: the map is not the draft's own; nothing was trained.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(start.config, indent=1, sort_keys=True))
    tensors = {name: tensor.contiguous() for name, tensor in start.tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_mapping(mapping, start.vocabulary)
    check_start(folder, mapping)


def check_start(folder: Path, mapping: Path) -> None:
    """The check before step 0, on the files that training will read.

    Raises:
        DraftError, ContractMismatch: the map is not the draft's own.
    """
    vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    check_mapping(mapping, load_file(folder / WEIGHTS), vocab_size)


def _fresh(samples: Samples, config: TrainingConfig, bundle: Path) -> Start:
    shape = draft_config(bundle, bundle_contract(bundle).aux_layers, config.draft_vocab_size)
    chosen = choose_vocabulary(samples.seen, samples.generated, shape["draft_vocab_size"])
    tensors = initial_tensors(bundle, shape, chosen, seed=config.seed)
    return Start(shape, tensors, chosen, coverage(chosen, samples.generated), rechosen=False)
