"""The head-only target bundle: all that training and evaluation need of a target model, without the model.

Owns what is in it (config.json, an index, embedding, lm_head and final norm, and the contract of the whole model) and
that it appears whole or not at all. Knows nothing of SpecForge.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file

from tide.domain import TargetContract
from tide.errors import BadInputError
from tide.files import write_durably
from tide.target_files import (
    CONTRACT_FILE,
    INDEX_FILE,
    bundle_contract,
    final_norm_key,
    head_keys,
    load_tensor,
    tensor_files,
)

_WEIGHTS = "model-00001-of-00001.safetensors"


def write_bundle(model: Path, destination: Path, contract: TargetContract) -> Path:
    """Cut the bundle out of a model folder; an existing one of the same contract is used again.

    Args:
        model: Hugging Face folder of the target.
        destination: folder of the bundle; replaced when it is of another target or incomplete.
        contract: of the whole model, see ``target_contract``.

    Raises:
        BadInputError: the model lacks a tensor.
        OSError: the disk refused; nothing readable was left.
    """
    if _is_current(destination, contract):
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        _fill(model, staging, contract)
        shutil.rmtree(destination, ignore_errors=True)
        staging.rename(destination)
    except OSError:
        # Another process may have published the same bundle between the check and the rename.
        if not _is_current(destination, contract):
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return destination


def _fill(model: Path, staging: Path, contract: TargetContract) -> None:
    keys = dict.fromkeys([*head_keys(model), final_norm_key(model)])
    tensors = {key: load_tensor(model, key).contiguous() for key in keys}
    shutil.copy(model / "config.json", staging / "config.json")
    save_file(tensors, staging / _WEIGHTS, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, _WEIGHTS)}
    write_durably(staging / INDEX_FILE, json.dumps(index, indent=1).encode())
    # Last, although the rename below is what counts: a bundle without a contract is none.
    write_durably(staging / CONTRACT_FILE, contract.to_json().encode())


def _is_current(bundle: Path, contract: TargetContract) -> bool:
    try:
        return bundle_contract(bundle) == contract and bool(tensor_files(bundle))
    except BadInputError:
        return False
