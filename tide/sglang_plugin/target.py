"""Identity of the target model that is really running: its contract, and the layers really captured.

Owns the cache of the contract (hashing a large model takes a minute) and the reading of what a model hands out. How a
contract is computed is the business of tide.models.target_files. Knows SGLang only through the attributes of a model
it is handed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tide.domain import TargetContract
from tide.errors import ConfigError
from tide.files import write_durably
from tide.models.target_files import INDEX_FILE, target_contract, weight_files


def running_contract(
    model_dir: Path, aux_layers: tuple[int, ...], dtype: str, quantization: str | None, cache: Path
) -> TargetContract:
    """Contract of the running target.

    Args:
        model_dir: folder with the weights that were loaded.
        aux_layers: as ``captured_layers`` gives them.
        dtype: what the engine computes in.
        quantization: what the engine quantises with; it counts even where the files are not quantised.
        cache: JSON file that remembers the contract while no file changes; made when missing.

    Raises:
        BadInputError: the folder is not a complete model folder.
    """
    key = _key(model_dir, aux_layers, dtype)
    known = _read(cache)
    try:
        contract = TargetContract.model_validate(known[key])
    except (KeyError, ValidationError):
        contract = target_contract(model_dir, aux_layers, dtype)
        _write(cache, {**known, key: contract.model_dump(mode="json")})
    return contract.model_copy(update={"quantization": quantization}) if quantization else contract


def captured_layers(model: Any) -> tuple[int, ...]:
    """Layers whose states the model hands out, as indices of layer OUTPUTS.

    SGLang's models keep ``layers_to_capture`` as the layers at whose INPUT they capture (the set-up functions add one
    to the configured ids, some models only under conditions): what was configured is not what is captured.

    Raises:
        ConfigError: the model captures no layers, or the embedding itself.
    """
    inner = getattr(model, "model", model)
    layers = getattr(inner, "layers_to_capture", None)
    if not layers:
        raise ConfigError(
            f"target {type(model).__name__} captures no layers: the draft's config.json must name them in "
            "eagle_config.eagle_aux_hidden_state_layer_ids, and --speculative-algorithm must be EAGLE3"
        )
    outputs = tuple(int(layer) - 1 for layer in layers)
    if min(outputs) < 0:
        raise ConfigError(f"target {type(model).__name__} captures the embedding ({layers}): no layer output to name")
    return outputs


def _key(model_dir: Path, aux_layers: tuple[int, ...], dtype: str) -> str:
    names = ("config.json", "tokenizer.json", INDEX_FILE)
    files = [*weight_files(model_dir), *(model_dir / n for n in names if (model_dir / n).is_file())]
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return json.dumps([stats, aux_layers, dtype])


def _read(cache: Path) -> dict[str, Any]:
    try:
        content = json.loads(cache.read_text())
    except (OSError, ValueError):  # a cache: absent or broken, it is made anew
        return {}
    return content if isinstance(content, dict) else {}


def _write(cache: Path, content: dict[str, Any]) -> None:
    write_durably(cache, json.dumps(content).encode())
