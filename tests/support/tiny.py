"""A tiny EAGLE3 draft with logged states that it partly predicts, for tests that need no model: milliseconds, exact.

``propose`` is a second implementation of chain drafting, written to be plain: float64, one anchor, one step at a time,
everything recomputed. Tests hold the real one against it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from tide.domain import ShardRequest, Split, TargetContract, split_of
from tide.models.draft_files import load_draft, write_draft
from tide.models.draft_format import expected_shapes, read_contract
from tide.states.shards import RequestStates, write_shard

VOCAB, DRAFT_VOCAB, HIDDEN = 64, 24, 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}
TARGET = TargetContract(
    weights="a" * 64,
    tokenizer="b" * 64,
    dtype="bfloat16",
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    aux_layers=(1, 2, 3),
)


def tiny_draft(parent: Path, seed: int = 0, **config: Any) -> Path:
    """A random draft of CONFIG; its vocabulary is every second target id."""
    values = CONFIG | config
    generator = torch.Generator().manual_seed(seed)
    d2t = torch.arange(DRAFT_VOCAB)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.arange(DRAFT_VOCAB) + d2t] = True
    tensors: dict[str, torch.Tensor] = {"d2t": d2t, "t2d": t2d}
    for name, shape in expected_shapes(read_contract(values, d2t)).items():
        if name not in tensors:
            scale = 0.4 if len(shape) > 1 else 1.0
            tensors[name] = torch.randn(shape, generator=generator) * scale
    return write_draft(parent, values, tensors)[0]


def tiny_bundle(folder: Path, target: TargetContract = TARGET) -> Path:
    """A head-only target of TARGET's widths."""
    folder.mkdir(parents=True, exist_ok=True)
    embedding = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(9))
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "contract.json").write_text(target.to_json())
    return folder


def embedding_of(bundle: Path) -> torch.Tensor:
    """The bundle's embedding, [VOCAB, HIDDEN]."""
    from safetensors.torch import load_file

    return load_file(bundle / "model.safetensors")["model.embed_tokens.weight"]


def tiny_states(
    draft: Path,
    bundle: Path,
    seed: int,
    *,
    prompt: int = 6,
    generated: int = 20,
    first_row: int = 0,
    follow: float = 0.7,
    info: ShardRequest | None = None,
) -> RequestStates:
    """Random features with an answer that follows the draft's own chains for stretches, so that walks jump."""
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn((prompt + generated - 1, 3 * HIDDEN), generator=generator).to(torch.bfloat16)
    ids = [int(i) for i in torch.randint(0, VOCAB, (prompt + 1,), generator=generator)]
    files, embedding = load_draft(draft), embedding_of(bundle)
    while len(ids) < prompt + generated:
        proposed = propose(
            files.tensors, embedding, aux[first_row:], ids[first_row:], len(ids) - 2 - first_row, steps=3
        )
        for token in proposed:
            follows = float(torch.rand((), generator=generator)) < follow
            ids.append(token if follows else int(torch.randint(0, VOCAB, (), generator=generator)))
            if not follows:
                break
    ids = ids[: prompt + generated]
    return RequestStates(
        info=info or request_info(f"request-{seed}"),
        input_ids=torch.tensor(ids[first_row:-1], dtype=torch.int32),
        last_token=ids[-1],
        first_row=first_row,
        prompt_len=prompt,
        aux_hidden=aux[first_row:],
        last_hidden=torch.zeros((len(aux) - first_row, HIDDEN), dtype=torch.bfloat16),
    )


def request_info(name: str, split: Split = Split.GATE, sampling: str = "greedy", slice: str = "chat") -> ShardRequest:
    """Identity of a request whose conversation falls into a split."""
    return ShardRequest.model_validate(
        {
            "request": name,
            "conversation": conversation(name, split),
            "slice": slice,
            "draft": "none",
            "sampling": sampling,
        }
    )


def conversation(seed: str, split: Split) -> str:
    """A conversation hash that falls into a split; the same for the same seed."""
    hashes = (hashlib.sha256(f"{seed}/{attempt}".encode()).hexdigest() for attempt in range(10_000))
    return next(found for found in hashes if split_of(found) is split)


def tiny_shard(
    folder: Path, states: list[RequestStates], split: Split = Split.GATE, target: TargetContract = TARGET
) -> Path:
    """A shard file of these requests."""
    return folder / write_shard(folder, states, split=split, target=target, opened_at=1.0, closed_at=2.0).file


def propose(
    tensors: Mapping[str, torch.Tensor],
    embedding: torch.Tensor,
    aux: torch.Tensor,
    ids: list[int],
    anchor: int,
    *,
    steps: int,
) -> list[int]:
    """Chain drafting from one anchor row: features up to the anchor, ids up to the one behind it."""
    weights = {name: t.double() for name, t in tensors.items() if t.is_floating_point()}
    hidden = [weights["fc.weight"] @ row.double() for row in aux[: anchor + 1]]
    tokens = list(ids[1 : anchor + 2])
    proposed: list[int] = []
    for _ in range(steps):
        out = last_row(weights, torch.stack(hidden), embedding.double()[torch.tensor(tokens)])
        scores = weights["lm_head.weight"] @ norm(out, weights["norm.weight"])
        best = int(scores.argmax())
        proposed.append(best + int(tensors["d2t"][best]))
        hidden.append(out)
        tokens.append(proposed[-1])
    return proposed


def last_row(weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """[H]: what the draft's layer gives at the last of its rows."""
    layer = "midlayer."
    inputs = torch.cat(
        [
            norm(embeds, weights[layer + "input_layernorm.weight"]),
            norm(hidden, weights[layer + "hidden_norm.weight"]),
        ],
        dim=-1,
    )
    places = torch.arange(len(inputs))
    query = _turn((inputs[-1:] @ weights[layer + "self_attn.q_proj.weight"].T).view(1, 4, 8), places[-1:])[0]
    keys = _turn((inputs @ weights[layer + "self_attn.k_proj.weight"].T).view(-1, 2, 8), places)
    values = (inputs @ weights[layer + "self_attn.v_proj.weight"].T).view(-1, 2, 8)
    heads = []
    for head in range(4):
        scores = keys[:, head // 2] @ query[head] / math.sqrt(8)
        heads.append(scores.softmax(-1) @ values[:, head // 2])
    x = hidden[-1] + weights[layer + "self_attn.o_proj.weight"] @ torch.cat(heads)
    y = norm(x, weights[layer + "post_attention_layernorm.weight"])
    gate = F.silu(weights[layer + "mlp.gate_proj.weight"] @ y) * (weights[layer + "mlp.up_proj.weight"] @ y)
    return x + weights[layer + "mlp.down_proj.weight"] @ gate


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last axis."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def _turn(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[n, heads, 8] rotated, each row by its place."""
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = places[:, None, None] / 10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)
