"""A draft's weights inside the running model: loaded in place, at the same addresses, without touching the target.

Owns which parameters are the draft's own, the load, and the proofs around it. Captured graphs hold the addresses of
parameters and of the vocabulary map, and the draft's embedding IS the target's, so both are checked at every swap.
Knows nothing of files, requests or when a swap happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tide.errors import DraftError
from tide.models.draft_files import DraftFiles

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_SAMPLES = 64
_SUMMED = ("embed_tokens", "lm_head")

Address = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LiveDraft:
    """The draft as the engine holds it."""

    model: Any
    """The draft's module; its ``load_weights`` knows how tensors are fused and split over ranks."""
    worker: Any
    """Owner of ``hot_token_id`` [DV] int64, or None there: what draft ids are mapped with, also inside graphs."""
    target: torch.nn.Module


def check_loadable(live: LiveDraft, draft: DraftFiles) -> None:
    """Refuse a draft whose tensors are not exactly the draft's own parameters; nothing is touched.

    Raises:
        DraftError: quantised or repacked weights, a parameter shared with the target, a name that maps to none, a
            parameter that would stay as it was, a dtype that would round, or a map that would appear or vanish.
    """
    _refuse_repacked(live.model)
    own = _own_parameters(live)
    wanted = {_parameter_of(name) for name in draft.tensors if name not in ("d2t", "t2d")}
    shared = sorted(wanted & (set(dict(live.model.named_parameters(remove_duplicate=False))) - set(own)))
    if shared:
        raise DraftError(
            f"draft parameter {shared[0]} is shared with the target: loading it would overwrite the target"
        )
    if wanted != set(own):
        missing, unknown = sorted(set(own) - wanted), sorted(wanted - set(own))
        raise DraftError(
            f"engine and draft differ in parameters: not in the file {missing}, not in the engine {unknown}"
        )
    for name, tensor in draft.tensors.items():
        if name not in ("d2t", "t2d"):
            _refuse_rounding(name, tensor, own[_parameter_of(name)])
    held = live.worker.hot_token_id
    length = None if held is None else tuple(held.shape)
    given = tuple(draft.tensors["d2t"].shape) if "d2t" in draft.tensors else None
    if length != given:
        raise DraftError(f"vocabulary map: the engine holds {length}, the draft has {given}: a restart is needed")


def load_in_place(live: LiveDraft, draft: DraftFiles) -> None:
    """Copy a checked draft into the live parameters and map.

    The caller has made sure that no forward pass is running.

    Raises:
        DraftError: an address, shape or stride moved; the caller must put the former draft back.
        RuntimeError: a copy failed; the same.
    """
    before = _addresses(live)
    # Some of these tensors may have been made in inference mode, and those can be written in no other.
    with torch.inference_mode():
        live.model.load_weights(iter(draft.tensors.items()))
        held = live.worker.hot_token_id
        if held is not None:
            held.copy_(draft.target_ids)
    moved = [name for name, address in _addresses(live).items() if before.get(name) != address]
    if moved:
        raise DraftError(
            f"loading moved {moved[0]} (and {len(moved) - 1} more): captured graphs would read freed memory"
        )


def fingerprint(model: torch.nn.Module) -> dict[str, int]:
    """Exact integer sums of bits: all of embedding and head, 64 samples of each other parameter.

    One transfer from the device. Equal before and after a swap, or the swap has reached the target.
    """
    with torch.inference_mode():
        parts = {name: _bits(name, p.detach()) for name, p in model.named_parameters(remove_duplicate=False)}
        values = torch.stack(list(parts.values())).tolist()
    return dict(zip(parts, values, strict=True))


def changed(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Names whose fingerprint differs."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _bits(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[] int64 on the tensor's device."""
    flat = tensor.reshape(-1)
    if not any(part in name for part in _SUMMED):
        step = max(1, flat.numel() // _SAMPLES)
        flat = flat[::step].contiguous()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    # Eight bytes at a time: 16 ms for 57 MB on one slow core, 30 times faster than a sum of bf16.
    return octets[:whole].view(torch.int64).sum() + octets[whole:].to(torch.int64).sum()


def _parameter_of(name: str) -> str:
    """Name of the live parameter that a tensor of the file goes to."""
    *path, projection, kind = name.replace("midlayer", "layers.0").split(".")
    inner = ".".join([*path, _FUSED.get(projection, projection), kind])
    return inner if inner.startswith("lm_head.") else f"model.{inner}"


def _own_parameters(live: LiveDraft) -> dict[str, torch.Tensor]:
    shared = {p.data_ptr() for p in live.target.parameters()}
    return {name: p for name, p in live.model.named_parameters(remove_duplicate=False) if p.data_ptr() not in shared}


def _addresses(live: LiveDraft) -> dict[str, Address]:
    tensors = dict(live.model.named_parameters(remove_duplicate=False))
    if live.worker.hot_token_id is not None:
        tensors["hot_token_id"] = live.worker.hot_token_id
    return {name: (t.data_ptr(), tuple(t.shape), tuple(t.stride())) for name, t in tensors.items()}


def _refuse_repacked(model: Any) -> None:
    if getattr(model, "quant_config", None) is not None:
        raise DraftError("the draft in serving is quantised: its weights are rebuilt on load; a restart is needed")
    packed = [n for n, module in model.named_modules() if getattr(module, "use_intel_amx_backend", False)]
    if packed:
        raise DraftError(f"the draft in serving is repacked for AMX ({packed[0]}): plain weights no longer fit")


def _refuse_rounding(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if torch.promote_types(tensor.dtype, parameter.dtype) != parameter.dtype:
        raise DraftError(
            f"draft tensor {name}: {tensor.dtype} would be rounded to the engine's {parameter.dtype}; "
            "export the draft in the engine's dtype"
        )
