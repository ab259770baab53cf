"""A target model's folder: its identity (the target contract) and the two tensors that drafting needs of it.

Owns how a model folder, or a head-only bundle of it, is named and read. The one implementation of the target contract:
capture, training and evaluation all compare what this module computes. Knows nothing of engines, trainers or drafts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from tide.domain import TargetContract
from tide.errors import BadInputError

if TYPE_CHECKING:
    import torch

CONTRACT_FILE = "contract.json"
"""In a head-only bundle: the contract of the whole model it was cut from."""
INDEX_FILE = "model.safetensors.index.json"

_EMBEDDING_KEYS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
_NORM_KEYS = ("model.norm.weight", "model.language_model.norm.weight", "norm.weight")
_HEAD_KEYS = ("lm_head.weight", "language_model.lm_head.weight")


def target_contract(model_dir: Path, aux_layers: Sequence[int], dtype: str) -> TargetContract:
    """Identity of a target model, computed from its files; reads every weight once (about 1.5 GB/s).

    Args:
        model_dir: Hugging Face folder: config.json, tokenizer.json, safetensors with or without an index.
        aux_layers: ids of the layer OUTPUTS captured (id i = output of layer i, the embedding not counted).
        dtype: what the engine computes in: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        BadInputError: a file is missing or unreadable, or the configuration lacks a width.
    """
    config = read_config(model_dir)
    return TargetContract(
        weights=weights_digest(model_dir),
        tokenizer=_sha256(_existing(model_dir, "tokenizer.json")),
        dtype=dtype.removeprefix("torch."),
        quantization=_quantization(config),
        hidden_size=_width(model_dir, config, "hidden_size"),
        vocab_size=_width(model_dir, config, "vocab_size"),
        aux_layers=tuple(int(layer) for layer in aux_layers),
    )


def bundle_contract(bundle: Path) -> TargetContract:
    """The contract a head-only bundle carries.

    Raises:
        BadInputError: no contract in the folder, or not a valid one.
    """
    path = _existing(bundle, CONTRACT_FILE)
    try:
        return TargetContract.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BadInputError(f"{path}: not a target contract: {error}") from error


def weights_digest(model_dir: Path) -> str:
    """sha256 over the sha256s of the weight files, in the order of their names.

    With an index only the files it names count; one that is missing is an error.

    Raises:
        BadInputError: no weights, or a file named by the index is missing.
    """
    whole = hashlib.sha256()
    for path in weight_files(model_dir):
        whole.update(_sha256(path).encode())
    return whole.hexdigest()


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name.

    Raises:
        BadInputError: none, or one that the index names is missing.
    """
    index = model_dir / INDEX_FILE
    if index.exists():
        return [_existing(model_dir, name) for name in sorted(set(_weight_map(index).values()))]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise BadInputError(f"{model_dir}: no *.safetensors; a target model is a Hugging Face folder with safetensors")
    return files


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a model folder; the text part of a multimodal one.

    Raises:
        BadInputError: missing or not JSON.
    """
    path = _existing(model_dir, "config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise BadInputError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInputError(f"{path}: not a JSON object")
    return {**config, **config.get("text_config", {})}


def head_keys(model_dir: Path) -> tuple[str, str]:
    """Names of the embedding and of the lm_head tensor; the same name twice when the head is tied.

    Raises:
        BadInputError: neither can be found.
    """
    places = tensor_files(model_dir)
    embedding = next((key for key in _EMBEDDING_KEYS if key in places), None)
    if embedding is None:
        raise BadInputError(f"{model_dir}: no embedding tensor; looked for {', '.join(_EMBEDDING_KEYS)}")
    head = next((key for key in _HEAD_KEYS if key in places), None)
    if head is None and not read_config(model_dir).get("tie_word_embeddings", False):
        raise BadInputError(f"{model_dir}: no lm_head tensor and tie_word_embeddings is not set")
    return embedding, head or embedding


def final_norm_key(model_dir: Path) -> str:
    """Name of the final norm's weight.

    Raises:
        BadInputError: it cannot be found.
    """
    places = tensor_files(model_dir)
    found = next((key for key in _NORM_KEYS if key in places), None)
    if found is None:
        raise BadInputError(f"{model_dir}: no final norm; looked for {', '.join(_NORM_KEYS)}")
    return found


def eagle3_layers(model_dir: Path) -> tuple[int, int, int]:
    """The layer outputs that EAGLE3 captures by convention: early, middle and late.

    Raises:
        BadInputError: the configuration has no layer count, or the model is too shallow.
    """
    layers = _width(model_dir, read_config(model_dir), "num_hidden_layers")
    chosen = (1, layers // 2 - 1, layers - 4)
    if not 1 < chosen[1] < chosen[2]:
        raise BadInputError(f"{model_dir}: {layers} layers are too few to capture three of them")
    return chosen


def load_tensor(model_dir: Path, key: str) -> torch.Tensor:
    """One tensor of a model folder or bundle, on the CPU, in its stored dtype; the others are not read.

    Raises:
        BadInputError: no such tensor, or its file is unreadable.
    """
    path = tensor_files(model_dir).get(key)
    if path is None:
        raise BadInputError(f"{model_dir}: no tensor {key}")
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path}: unreadable: {error}") from error


def tensor_shape(model_dir: Path, key: str) -> tuple[int, ...]:
    """Shape of one tensor; only the header of its file is read.

    Raises:
        BadInputError: no such tensor, or its file is unreadable.
    """
    path = tensor_files(model_dir).get(key)
    if path is None:
        raise BadInputError(f"{model_dir}: no tensor {key}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return tuple(file.get_slice(key).get_shape())
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path}: unreadable: {error}") from error


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Where each tensor of a model folder is.

    Raises:
        BadInputError: no weights, or an unreadable file.
    """
    index = model_dir / INDEX_FILE
    if index.exists():
        return {key: _existing(model_dir, name) for key, name in _weight_map(index).items()}
    places: dict[str, Path] = {}
    for path in weight_files(model_dir):
        try:
            with safe_open(str(path), framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{path}: unreadable: {error}") from error
    return places


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{index}: not a safetensors index: {error!r}") from error


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise BadInputError(f"{path} does not exist; {folder} is not a complete model folder")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _quantization(config: dict[str, Any]) -> str | None:
    method = (config.get("quantization_config") or {}).get("quant_method")
    return None if method is None else str(method)


def _width(model_dir: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise BadInputError(f"{model_dir}/config.json: {key} is {value!r}, expected a positive integer")
    return value
