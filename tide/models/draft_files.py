"""A draft on disk: a folder named by the sha256 of its weights, with ``config.json`` and ``model.safetensors``.

Owns how a draft is read (once, hashed and checked) and published (whole or not at all). What makes a draft is in
``draft_format``. Knows nothing of engines, trainers or stores: all three read and write drafts through this module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from tide.domain import DraftContract, DraftModel
from tide.errors import ContractMismatch, DraftError
from tide.files import whole_folder, write_durably
from tide.models.draft_format import (
    ARCHITECTURE,
    expected_shapes,
    read_contract,
    target_ids,
    validate_tensors,
    vocab_map_digest,
)

__all__ = [
    "ARCHITECTURE",
    "DraftFiles",
    "expected_shapes",
    "load_draft",
    "read_config",
    "read_contract",
    "target_ids",
    "validate_tensors",
    "vocab_map_digest",
    "write_draft",
    "write_record",
]

CONFIG_FILE, WEIGHTS_FILE, RECORD_FILE = "config.json", "model.safetensors", "draft.json"
_CONTRACT_KEY = "tide.contract"


@dataclass(frozen=True)
class DraftFiles:
    """A valid draft, as read from one read of its bytes."""

    digest: str
    """sha256 of ``model.safetensors``."""
    contract: DraftContract
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    """On the host, by the names of the file."""
    record: DraftModel | None
    """What ``draft.json`` beside the weights says, if it is there."""

    @property
    def target_ids(self) -> torch.Tensor:
        """[DV] int64: the target id of each draft id."""
        return target_ids(self.contract, self.tensors)


def load_draft(folder: Path, *, expected: str | None = None, drop_embedding: bool = False) -> DraftFiles:
    """Read a draft folder: the weights are read once, and what was hashed is what is returned.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and perhaps ``draft.json``.
        expected: sha256 that the weights must have.
        drop_embedding: leave out a copy of the target's embedding, which published drafts may carry and which an engine
            replaces by the target's own when it STARTS with such a draft. A swap never may: see validate_tensors.

    Raises:
        DraftError: a file is missing, malformed or changed, or the tensors are refused (see validate_tensors).
        ContractMismatch: the weights or the record were made for another configuration than the one beside them.
    """
    config = read_config(folder)
    data = _read_weights(folder)
    digest = hashlib.sha256(data).hexdigest()
    if expected is not None and digest != expected:
        raise DraftError(f"draft {folder}: sha256 of {WEIGHTS_FILE} is {digest[:12]}, {expected[:12]} was asked for")
    try:
        tensors, metadata = load(data), _metadata(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DraftError(f"draft {folder}: {WEIGHTS_FILE} is no safetensors file: {error}") from error
    if drop_embedding:
        tensors = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    contract = read_contract(config, tensors.get("d2t"))
    validate_tensors(contract, tensors)
    if metadata.get(_CONTRACT_KEY, contract.digest()) != contract.digest():
        raise ContractMismatch(
            f"draft (weights of {folder} and the config.json beside them)", ("config.json: changed",)
        )
    return DraftFiles(digest, contract, config, tensors, _read_record(folder, digest, contract))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a draft folder, as it stands.

    Raises:
        DraftError: missing, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DraftError(f"draft config {path}: unreadable: {error}") from error
    if not isinstance(config, dict):
        raise DraftError(f"draft config {path}: not a JSON object")
    return config


def write_draft(parent: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[Path, str]:
    """Publish a draft as ``parent/<sha256>/``; it is there whole or not at all, and writing it again changes nothing.

    The contract's digest goes into the weights file, so that the name stands for the configuration as well.

    Args:
        parent: folder of drafts; made when missing.
        config: content for ``config.json``.
        tensors: as listed in ``draft_format``; moved to the host.

    Returns:
        The folder, and the sha256 it is named by.

    Raises:
        DraftError: the configuration or the tensors are refused; nothing was written.
        OSError: the disk refused; nothing readable was left.
    """
    contract = read_contract(config, tensors.get("d2t"))
    validate_tensors(contract, tensors)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = _canonical(save(own, metadata={"format": "pt", _CONTRACT_KEY: contract.digest()}))
    digest = hashlib.sha256(data).hexdigest()
    folder = parent / digest
    if folder.exists():
        load_draft(folder, expected=digest)
        return folder, digest
    with whole_folder(folder, replace=False) as temporary:
        write_durably(temporary / CONFIG_FILE, json.dumps(dict(config), indent=1, sort_keys=True).encode())
        write_durably(temporary / WEIGHTS_FILE, data)
    return folder, digest


def write_record(folder: Path, record: DraftModel) -> None:
    """Put a draft's record beside its weights as ``draft.json``, whole or not at all.

    Raises:
        DraftError: the record is of another draft.
        ContractMismatch: the record's contract is not the folder's.
    """
    draft = load_draft(folder)
    _check_record(folder, record, draft.digest, draft.contract)
    write_durably(folder / RECORD_FILE, record.to_json().encode())


def _read_weights(folder: Path) -> bytes:
    try:
        return (folder / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise DraftError(f"draft {folder}: {WEIGHTS_FILE} unreadable (one file, not shards): {error}") from error


def _metadata(data: bytes) -> dict[str, str]:
    """The free-form strings in the header of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return {str(k): str(v) for k, v in found.items()}


def _canonical(data: bytes) -> bytes:
    """The same safetensors file with its header in a fixed order: safetensors shuffles the metadata from run to run."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _read_record(folder: Path, digest: str, contract: DraftContract) -> DraftModel | None:
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    try:
        record = DraftModel.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DraftError(f"draft record {path}: unreadable: {error}") from error
    _check_record(folder, record, digest, contract)
    return record


def _check_record(folder: Path, record: DraftModel, digest: str, contract: DraftContract) -> None:
    if record.digest != digest:
        raise DraftError(f"draft {folder}: its record is of draft {record.digest[:12]}, its weights are {digest[:12]}")
    differences = record.contract.differences(contract)
    if differences:
        raise ContractMismatch(f"draft (record and files of {folder})", differences)
