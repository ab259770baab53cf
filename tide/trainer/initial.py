"""The draft that training starts from when there is no parent: its configuration and its first weights.

Owns the shape of a fresh EAGLE3 draft for a target, and its deterministic initialisation. Knows nothing of SpecForge,
of data or of where drafts are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tide.errors import BadInputError
from tide.models.draft_format import expected_shapes, read_contract
from tide.models.target_files import final_norm_key, head_keys, load_tensor, read_config
from tide.trainer.vocabulary import Vocabulary

WEIGHT_STD = 0.02
FC_NOISE_STD = 0.01

_COPIED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "vocab_size")
_COPIED_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SHARED_ROPE = ("linear", "llama3")
"""Scalings that SpecForge, SGLang and our walk compute alike. YaRN is not among them: SpecForge 0.2.0 rounds its
correction range where gpt-oss says not to (``truncate: false``), so a draft would be served with other angles than it
was trained with. A draft's RoPE is its own: under such a target it is the plain one."""


def draft_config(target: Path, aux_layers: Sequence[int], draft_vocab_size: int) -> dict[str, Any]:
    """Content of ``config.json`` for a one-layer draft with the target's own widths.

    Args:
        target: model folder or head-only bundle.
        aux_layers: the three captured layer outputs.
        draft_vocab_size: rows of the draft's own lm_head; capped at the target's vocabulary.

    Raises:
        BadInputError: the target's configuration lacks a field.
    """
    found = read_config(target)
    rope = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or found.get("rope_theta")
    needed = (*_COPIED, "max_position_embeddings")
    missing = [name for name in needed if found.get(name) is None]
    if missing or theta is None:
        lacking = ", ".join(missing or ["rope_theta"])
        raise BadInputError(f"{target}/config.json lacks {lacking}: no draft can be shaped after it")
    shared = rope.get("rope_type", rope.get("type", "default")) in _SHARED_ROPE
    return {
        **{name: found[name] for name in needed},
        **{name: _one_id(found.get(name)) for name in _COPIED_IDS},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": _intermediate_size(found),
        "head_dim": found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"],
        "target_hidden_size": found["hidden_size"],
        "draft_vocab_size": min(draft_vocab_size, int(found["vocab_size"])),
        "rope_theta": float(theta),
        "rope_scaling": rope if shared else None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [int(layer) for layer in aux_layers],
            "use_aux_hidden_state": True,
        },
    }


def initial_tensors(
    target: Path, config: dict[str, Any], vocabulary: Vocabulary, *, seed: int
) -> dict[str, torch.Tensor]:
    """First weights: the target's own lm_head rows and final norm, the last captured layer passed through, small noise.

    The same arguments give the same bits.

    Args:
        target: model folder or head-only bundle (lm_head and final norm are read).
        config: from ``draft_config``.

    Returns:
        Tensors of SGLang's EAGLE3 format, bfloat16.
    """
    contract = read_contract(config, vocabulary.d2t)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(contract).items():
        if name in {"d2t", "t2d"}:
            continue
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = (torch.randn(shape, generator=generator) * WEIGHT_STD).bfloat16()
    width = contract.target_hidden_size
    fc = torch.randn(contract.hidden_size, 3 * width, generator=generator) * FC_NOISE_STD
    if contract.hidden_size == width:
        fc[:, 2 * width :] += torch.eye(width)
        tensors["norm.weight"] = load_tensor(target, final_norm_key(target)).bfloat16()
        tensors["lm_head.weight"] = load_tensor(target, head_keys(target)[1])[vocabulary.ids].bfloat16()
    tensors["fc.weight"] = fc.bfloat16()
    return tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def _intermediate_size(config: dict[str, Any]) -> int:
    """The target's MLP width; four times the hidden size where the target is a mixture of small experts."""
    size = int(config.get("intermediate_size") or 0)
    return size if size > int(config["hidden_size"]) else 4 * int(config["hidden_size"])


def _one_id(value: Any) -> int | None:
    """Token ids may come as lists; SpecForge wants one, and takes 0 for no padding."""
    first = value[0] if isinstance(value, list) and value else value
    return None if first is None else int(first)
