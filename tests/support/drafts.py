"""Small drafts for tests: valid ones, and the parts to break them with.

Sizes default to a toy; ``for_model`` takes them from a target model's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TOY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
    "draft_vocab_size": 20,
    "target_hidden_size": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


ECHO_PROMPT = [1604] + [198] * 30
"""Ids after which SmolLM2 goes on with newlines."""


def draft_config(aux_layers: tuple[int, ...] = (1, 2, 3), **changes: Any) -> dict[str, Any]:
    """Content of a config.json; ``changes`` replace or, with None, remove fields."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers), "use_aux_hidden_state": True},
        **TOY,
        **changes,
    }
    return {k: v for k, v in config.items() if v is not None}


def for_model(model: Path, draft_vocab_size: int = 8192) -> dict[str, Any]:
    """The configuration of a draft for a target model folder."""
    target = json.loads((model / "config.json").read_text())
    same = {k: target[k] for k in TOY if k in target}
    layers = target["num_hidden_layers"]
    rope = target.get("rope_parameters") or target
    return draft_config(
        (1, layers // 2 - 1, layers - 4),
        **{**same, "target_hidden_size": target["hidden_size"], "draft_vocab_size": draft_vocab_size},
        rope_theta=rope["rope_theta"],
    )


def draft_tensors(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Random tensors for a configuration; the draft vocabulary is every k-th token of the target's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(dtype)

    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    vocab, own = config["vocab_size"], config["draft_vocab_size"]
    ids = torch.arange(own) * (vocab // own)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    ones = {f"midlayer.{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    return {
        "midlayer.self_attn.q_proj.weight": normal(heads, 2 * h),
        "midlayer.self_attn.k_proj.weight": normal(kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": normal(kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": normal(h, heads),
        "midlayer.mlp.gate_proj.weight": normal(i, h),
        "midlayer.mlp.up_proj.weight": normal(i, h),
        "midlayer.mlp.down_proj.weight": normal(h, i),
        **{name: torch.ones(h, dtype=dtype) for name in (*sorted(ones), "norm.weight")},
        "fc.weight": normal(h, 3 * config["target_hidden_size"]),
        "lm_head.weight": normal(own, h),
        "d2t": ids - torch.arange(own),
        "t2d": t2d,
    }


def echo_tensors(model: Path, config: dict[str, Any], seed: int | None = None) -> dict[str, torch.Tensor]:
    """A draft that proposes the token seen most: accepted in full where the target repeats one (see ECHO_PROMPT).

    Attention without a preference averages the embeddings of the context, projected to what its heads can carry; the
    head finds the nearest token. The draft vocabulary is the first ids of the target; with a seed they stand in another
    order, head rows and map alike: it proposes the same tokens if, and only if, the engine uses new map and new head.
    """
    embedding = next(_tensors_of(model, "model.embed_tokens.weight")).float()
    own, h, d = config["draft_vocab_size"], config["hidden_size"], config["head_dim"]
    kv, group = config["num_key_value_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    order = torch.arange(own)
    if seed is not None:
        order = torch.randperm(own, generator=torch.Generator().manual_seed(seed))
    basis = torch.linalg.qr(torch.randn(h, kv * d, generator=torch.Generator().manual_seed(0)))[0]
    output = torch.zeros(h, config["num_attention_heads"] * d)
    for head in range(kv):
        output[:, head * group * d : (head * group + 1) * d] = basis[:, head * d : (head + 1) * d]
    rows = embedding[order]
    tensors = {
        name: torch.ones_like(t) if "norm" in name else torch.zeros_like(t) for name, t in draft_tensors(config).items()
    }
    return tensors | {
        "midlayer.self_attn.v_proj.weight": torch.cat([basis.T, torch.zeros(kv * d, h)], 1).to(torch.bfloat16),
        "midlayer.self_attn.o_proj.weight": output.to(torch.bfloat16),
        "lm_head.weight": (rows / rows.norm(dim=1, keepdim=True)).to(torch.bfloat16),
        "d2t": order - torch.arange(own),
        "t2d": torch.arange(config["vocab_size"]) < own,
    }


def _tensors_of(model: Path, name: str) -> Iterator[torch.Tensor]:
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  safe_open is no mapping
                yield file.get_tensor(name)
