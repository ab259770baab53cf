"""Linear layers over weights kept in oneDNN's blocked layout, float32 only.

Owns: the packed copy of each weight, and dropping it whenever the model loads weights. Does not know: the model.

torch's plain float32 product of a few rows with a large weight does not reach the memory's speed: one forward pass of
SmolLM2-135M's products took 84, 159 and 208 ms for 1, 4 and 16 rows on two cores without AVX-512, packed 62, 62 and 105
(medians, 2026-11-30). Verifying four tokens then costs as much as decoding one, as on a GPU. The price is a second copy
of the weights.

A weight is packed at its first use. Whoever writes weights around the model's own `load_weights` must call `forget`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

# Rows to choose the layout for. 4 to 16 are the fastest at every number of rows from 1 to 256.
ROWS = 8


class PackedMethod:
    """Stands in for a layer's `quant_method`: the same product, from the packed copy."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.packed: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] by the layer's weight [N, K]: [..., N]."""
        if x.dtype is not torch.float32 or not x.numel():
            return linear(x, layer.weight, bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product


def pack(model: Any) -> int:
    """Let the plain float32 linear layers and the head of a loaded model compute from packed weights.

    Returns the number of layers. Layers with quantised, shared or other weights stay as they are.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

    count = 0
    for module in model.modules():
        plain = UnquantizedEmbeddingMethod if module is getattr(model, "lm_head", None) else UnquantizedLinearMethod
        if type(getattr(module, "quant_method", None)) is plain and module.weight.dtype is torch.float32:
            module.quant_method = PackedMethod(module.quant_method)
            count += 1
    if count:
        model.load_weights = _forgetting(model, model.load_weights)
    return count


def forget(model: torch.nn.Module) -> None:
    """Drop every packed copy; the next use packs the weights anew."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, PackedMethod):
            method.packed = None


def _forgetting(model: torch.nn.Module, load_weights: Callable[..., Any]) -> Callable[..., Any]:
    def load_and_forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return load_weights(*args, **kwargs)
        finally:
            forget(model)  # a load that failed has still written some

    return load_and_forget
