"""A draft on disk: ``config.json`` and ``model.safetensors`` in SGLang's EAGLE3 format, in a folder named by its sha256.

Owns which files, names, shapes and values make a draft, its contract and its digest, and how a draft is published.
Knows nothing of engines, trainers or stores: all three read and write drafts through this module.

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
import os
import shutil
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

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG_FILE, WEIGHTS_FILE, RECORD_FILE = "config.json", "model.safetensors", "draft.json"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AUX_LAYERS = 3

_CONTRACT_KEY = "tide.contract"
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
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise DraftError(f"draft tensor {name}: {bad} of {tensor.numel()} values are not finite")
    if "d2t" in tensors:
        _check_map(contract, tensors["d2t"], tensors.get("t2d"))


def load_draft(folder: Path, *, expected: str | None = None) -> DraftFiles:
    """Read a draft folder: the weights are read once, and what was hashed is what is returned.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and perhaps ``draft.json``.
        expected: sha256 that the weights must have.

    Raises:
        DraftError: a file is missing, malformed or changed, or the tensors are refused (see validate_tensors).
        ContractMismatch: the weights or the record were made for another configuration than the one beside them.
    """
    config = _read_config(folder / CONFIG_FILE)
    data = _read_weights(folder)
    digest = hashlib.sha256(data).hexdigest()
    if expected is not None and digest != expected:
        raise DraftError(f"draft {folder}: sha256 of {WEIGHTS_FILE} is {digest[:12]}, {expected[:12]} was asked for")
    try:
        tensors, metadata = load(data), _metadata(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DraftError(f"draft {folder}: {WEIGHTS_FILE} is no safetensors file: {error}") from error
    contract = read_contract(config, tensors.get("d2t"))
    validate_tensors(contract, tensors)
    if metadata.get(_CONTRACT_KEY, contract.digest()) != contract.digest():
        raise ContractMismatch(
            f"draft (weights of {folder} and the config.json beside them)", ("config.json: changed",)
        )
    return DraftFiles(digest, contract, config, tensors, _read_record(folder, digest, contract))


def write_draft(parent: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[Path, str]:
    """Publish a draft as ``parent/<sha256>/``; it is there whole or not at all, and writing it again changes nothing.

    The contract's digest goes into the weights file, so that the name stands for the configuration as well.

    Args:
        parent: folder of drafts; made when missing.
        config: content for ``config.json``.
        tensors: as listed in this module's docstring; moved to the host.

    Returns:
        The folder, and the sha256 it is named by.

    Raises:
        DraftError: the configuration or the tensors are refused; nothing was written.
        OSError: the disk refused; nothing readable was left.
    """
    contract = read_contract(config, tensors.get("d2t"))
    validate_tensors(contract, tensors)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = save(own, metadata={"format": "pt", _CONTRACT_KEY: contract.digest()})
    digest = hashlib.sha256(data).hexdigest()
    folder = parent / digest
    if folder.exists():
        load_draft(folder, expected=digest)
        return folder, digest
    parent.mkdir(parents=True, exist_ok=True)
    staging = parent / f".{digest}.{os.getpid()}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        _write(staging / CONFIG_FILE, json.dumps(dict(config), indent=1, sort_keys=True).encode())
        _write(staging / WEIGHTS_FILE, data)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder, digest


def write_record(folder: Path, record: DraftModel) -> None:
    """Put a draft's record beside its weights as ``draft.json``, whole or not at all.

    Raises:
        DraftError: the record is of another draft.
        ContractMismatch: the record's contract is not the folder's.
    """
    draft = load_draft(folder)
    _check_record(folder, record, draft.digest, draft.contract)
    temporary = folder / f".{RECORD_FILE}.{os.getpid()}.tmp"
    _write(temporary, record.to_json().encode())
    temporary.rename(folder / RECORD_FILE)


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


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DraftError(f"draft config {path}: unreadable: {error}") from error
    if not isinstance(config, dict):
        raise DraftError(f"draft config {path}: not a JSON object")
    return config


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


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
