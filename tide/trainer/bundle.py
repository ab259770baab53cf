"""The head-only target bundle: all that training and evaluation need of a target model, without the model.

Owns what is in it (config.json, an index, embedding, lm_head and final norm, and the contract of the whole model) and
that it appears whole or not at all. Knows nothing of SpecForge.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from tide.domain import TargetContract
from tide.errors import BadInputError
from tide.files import whole_folder, write_durably
from tide.models.target_files import (
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
    try:
        with whole_folder(destination) as temporary:
            _fill(model, temporary, contract)
    except OSError:
        # Another process may have published the same bundle between the check and the rename.
        if not _is_current(destination, contract):
            raise
    return destination


def _fill(model: Path, folder: Path, contract: TargetContract) -> None:
    keys = dict.fromkeys([*head_keys(model), final_norm_key(model)])
    tensors = {key: load_tensor(model, key).contiguous() for key in keys}
    shutil.copy(model / "config.json", folder / "config.json")
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, _WEIGHTS)}
    write_durably(folder / INDEX_FILE, json.dumps(index, indent=1).encode())
    # Last, although the rename below is what counts: a bundle without a contract is none.
    write_durably(folder / CONTRACT_FILE, contract.to_json().encode())


def _is_current(bundle: Path, contract: TargetContract) -> bool:
    try:
        return bundle_contract(bundle) == contract and bool(tensor_files(bundle))
    except BadInputError:
        return False
