"""What makes a draft: its configuration fields, its tensors, and the contract they stand for.

Owns names, shapes, dtypes and values of SGLang's EAGLE3 format. Knows nothing of folders, engines or trainers.

Tensors, for H = hidden size, T = target hidden size, I = intermediate size, D = head_dim, V and DV the vocabularies:

    midlayer.self_attn.{q,k,v}_proj.weight   [heads * D, 2H]   input is embedding | hidden state
    midlayer.self_attn.o_proj.weight         [H, heads * D]
    midlayer.mlp.{gate,up}_proj.weight       [I, H]
    midlayer.mlp.down_proj.weight            [H, I]
    midlayer.{hidden_norm,input_layernorm,post_attention_layernorm}.weight, norm.weight   [H]
    fc.weight                                [H, 3T]
    lm_head.weight                           [DV, H]
    d2t                                      [DV] int64        target id minus draft id
    t2d                                      [V] bool          target ids that the draft knows

All float tensors share one dtype. The embedding is the target's own and is refused in a draft.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from tide.domain import DraftContract
from tide.errors import DraftError

ARCHITECTURE = "LlamaForCausalLMEagle3"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AUX_LAYERS = 3

_PLAIN_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)
# Each changes the forward pass, and the three readers of a draft do not agree on what it does: refused, not ignored.
_UNSUPPORTED = (
    "attention_bias",
    "bias",
    "fc_norm",
    "mlp_bias",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "tie_word_embeddings",
    "use_aux_norm",
)


def read_contract(config: Mapping[str, Any], d2t: torch.Tensor | None) -> DraftContract:
    """The contract that a configuration and a vocabulary map stand for.

    Args:
        config: the content of ``config.json``.
        d2t: [DV] int64, or None for a draft that speaks the target's whole vocabulary.

    Raises:
        DraftError: another architecture, a missing field, a feature that not every reader of a draft supports, or a
            reduced vocabulary without a map.
    """
    _refuse_features(config)
    missing = [name for name in _PLAIN_FIELDS if config.get(name) is None]
    if missing:
        raise DraftError(f"draft config: {', '.join(missing)} missing; export the draft with its whole configuration")
    vocab = int(config["vocab_size"])
    draft_vocab = config.get("draft_vocab_size")
    if draft_vocab is None:
        raise DraftError(
            "draft config: draft_vocab_size missing: the engine would silently use the target's lm_head. "
            f"Set it to the rows of the draft's own lm_head ({vocab} for the whole vocabulary)"
        )
    theta, scaling = _rope(config)
    fields = {name: config[name] for name in _PLAIN_FIELDS} | {
        "num_hidden_layers": int(config.get("num_hidden_layers", 1)),
        "head_dim": config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "draft_vocab_size": int(draft_vocab),
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "aux_layers": _aux_layers(config),
        "vocab_map": vocab_map_digest(_map_or_identity(d2t, int(draft_vocab), vocab)),
    }
    try:
        contract = DraftContract.model_validate(fields)
    except ValidationError as error:
        raise DraftError(f"draft config: {error}") from error
    if contract.num_hidden_layers != 1:
        raise DraftError(f"draft config: num_hidden_layers is {contract.num_hidden_layers}; an EAGLE3 draft has 1")
    return contract


def vocab_map_digest(d2t: torch.Tensor) -> str:
    """sha256 of a vocabulary map as little-endian int64."""
    return hashlib.sha256(d2t.detach().cpu().to(torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def target_ids(contract: DraftContract, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[DV] int64: the target id of each draft id; the identity when the draft has no map."""
    ids = torch.arange(contract.draft_vocab_size)
    return ids + tensors["d2t"] if "d2t" in tensors else ids


def expected_shapes(contract: DraftContract) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a draft of this contract must have."""
    c, layer = contract, "midlayer."
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        layer + "self_attn.q_proj.weight": (heads, 2 * c.hidden_size),
        layer + "self_attn.k_proj.weight": (kv, 2 * c.hidden_size),
        layer + "self_attn.v_proj.weight": (kv, 2 * c.hidden_size),
        layer + "self_attn.o_proj.weight": (c.hidden_size, heads),
        layer + "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        layer + "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        layer + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        layer + "hidden_norm.weight": (c.hidden_size,),
        layer + "input_layernorm.weight": (c.hidden_size,),
        layer + "post_attention_layernorm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
        "fc.weight": (c.hidden_size, len(c.aux_layers) * c.target_hidden_size),
        "lm_head.weight": (c.draft_vocab_size, c.hidden_size),
    }
    if c.draft_vocab_size != c.vocab_size:
        shapes |= {"d2t": (c.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return shapes


def validate_tensors(contract: DraftContract, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not exactly a draft of this contract: names, shapes, dtypes, values, map.

    Raises:
        DraftError: names the tensor and the rule.
    """
    _check_names(contract, tensors)
    for name, shape in expected_shapes(contract).items():
        if tuple(tensors[name].shape) != shape:
            raise DraftError(f"draft tensor {name}: shape {tuple(tensors[name].shape)}, the contract wants {shape}")
    _check_dtypes(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not _finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise DraftError(f"draft tensor {name}: {bad} of {tensor.numel()} values are not finite")
    if "d2t" in tensors:
        _check_map(contract, tensors["d2t"], tensors.get("t2d"))


def _finite(tensor: torch.Tensor) -> bool:
    # NaN goes through aminmax, and it is 20 times faster than isfinite: this runs between two steps of a busy engine.
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def _refuse_features(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise DraftError(f"draft config: architectures is {architectures}, not ['{ARCHITECTURE}']")
    if config.get("quantization_config"):
        raise DraftError("draft config: quantised drafts are refused: their weights cannot be exchanged in place")
    nested = config.get("eagle_config") or {}
    used = [name for name in _UNSUPPORTED if config.get(name) or nested.get(name)]
    if used:
        raise DraftError(f"draft config: {', '.join(used)} is not supported; train the draft without it")


def _rope(config: Mapping[str, Any]) -> tuple[float, str | None]:
    """Base and scaling, from either spelling: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters``."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        raise DraftError("draft config: rope_theta missing")
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return float(theta), None
    return float(theta), json.dumps(scaling, sort_keys=True, separators=(",", ":"))


def _aux_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers or len(layers) != AUX_LAYERS:
        raise DraftError(
            f"draft config: eagle_config.eagle_aux_hidden_state_layer_ids is {layers}; it must name the "
            f"{AUX_LAYERS} target layers that the draft was trained on (elsewhere in the file the engine ignores it)"
        )
    return tuple(int(i) for i in layers)


def _map_or_identity(d2t: torch.Tensor | None, draft_vocab: int, vocab: int) -> torch.Tensor:
    if d2t is not None:
        return d2t
    if draft_vocab != vocab:
        raise DraftError(
            f"draft: no d2t, but its vocabulary has {draft_vocab} of {vocab} tokens: every proposal would be wrong"
        )
    return torch.zeros(vocab, dtype=torch.int64)


def _check_names(contract: DraftContract, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = set(expected_shapes(contract))
    missing = sorted(wanted - set(tensors))
    # A whole-vocabulary draft may carry its identity map.
    extra = sorted(set(tensors) - wanted - {"d2t", "t2d"})
    embedding = [name for name in extra if "embed_tokens" in name]
    if embedding:
        raise DraftError(
            f"draft tensor {embedding[0]}: it belongs to the target; loading it would overwrite the target"
        )
    if missing or extra:
        raise DraftError(f"draft tensors: missing {missing or 'none'}, unknown {extra or 'none'}")


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    found = {n: t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")}
    first = found["fc.weight"]
    if first not in FLOAT_DTYPES:
        raise DraftError(f"draft tensor fc.weight: dtype {first}, not one of {', '.join(map(str, FLOAT_DTYPES))}")
    for name, dtype in found.items():
        if dtype != first:
            raise DraftError(f"draft tensor {name}: dtype {dtype}, but fc.weight has {first}")
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in tensors and tensors[name].dtype != dtype:
            raise DraftError(f"draft tensor {name}: dtype {tensors[name].dtype}, not {dtype}")


def _check_map(contract: DraftContract, d2t: torch.Tensor, t2d: torch.Tensor | None) -> None:
    if tuple(d2t.shape) != (contract.draft_vocab_size,):
        raise DraftError(f"draft tensor d2t: shape {tuple(d2t.shape)}, not ({contract.draft_vocab_size},)")
    ids = d2t + torch.arange(contract.draft_vocab_size, device=d2t.device)
    if int(ids.min()) < 0 or int(ids.max()) >= contract.vocab_size:
        raise DraftError(
            f"draft tensor d2t: target ids {int(ids.min())}..{int(ids.max())} leave the vocabulary of "
            f"{contract.vocab_size}; d2t is target id MINUS draft id"
        )
    known = torch.zeros(contract.vocab_size, dtype=torch.bool, device=d2t.device)
    known[ids] = True
    if int(known.sum()) != contract.draft_vocab_size:
        raise DraftError("draft tensor d2t: two draft ids stand for one target id")
    if t2d is not None and not torch.equal(known, t2d):
        wrong = int((known != t2d).sum()) if known.shape == t2d.shape else contract.vocab_size
        raise DraftError(f"draft tensors d2t and t2d disagree on {wrong} target ids")
