"""What the CPU attention backend refuses, checked once when the server starts.

Owns: the list of unsupported model and layer features, each with its reason in words. Does not know: how attention is
computed. Takes SGLang objects as they are and imports nothing of SGLang at module level but the layer class.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention


class UnsupportedOnCPUError(NotImplementedError):
    """The model or an option needs what the CPU attention backend does not do."""


def check_runner(runner: Any) -> None:
    """Refuse a model runner whose model, KV pool or layers need what is not implemented.

    Raises UnsupportedOnCPUError naming everything that was found, at server start.
    """
    problems = [*_model_problems(runner), *_pool_problems(runner.token_to_kv_pool)]
    for name, module in runner.model.named_modules():
        if isinstance(module, RadixAttention):
            problems += [f"layer {name}: {problem}" for problem in layer_problems(module)]
    if problems:
        raise UnsupportedOnCPUError(
            "tide-sglang-cpu's attention backend cannot serve this model: "
            + "; ".join(problems[:4])
            + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
            + ". Serve it on a GPU, or choose another --attention-backend."
        )


def _model_problems(runner: Any) -> Iterator[str]:
    if runner.use_mla_backend:
        yield "multi-head latent attention (MLA)"
    if runner.model_config.is_encoder_decoder:
        yield "an encoder-decoder model"


def _pool_problems(pool: Any) -> Iterator[str]:
    kind = type(pool).__name__
    if kind not in ("MHATokenToKVPool",):
        yield f"a KV pool of kind {kind} (only plain MHATokenToKVPool)"
        return
    if getattr(pool, "use_hnd", False):
        yield "a head-major KV layout (--kv-cache-layout hnd)"
    if pool.store_dtype != pool.dtype or pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        yield f"a quantised KV cache ({pool.dtype})"


def layer_problems(layer: Any) -> Iterator[str]:
    """What this attention layer asks for and does not get; nothing when it is supported."""
    if layer.is_cross_attention:
        yield "cross attention"
    if layer.attn_type is not AttentionType.DECODER:
        yield f"attention type {layer.attn_type.value}"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        yield f"a sliding window of {layer.sliding_window_size}"
    if layer.logit_cap:
        yield f"a logit cap of {layer.logit_cap}"
    if layer.pos_encoding_mode != "NONE":
        yield f"position encoding {layer.pos_encoding_mode} inside attention"
    if layer.use_irope or layer.xai_temperature_len > 0:
        yield "length-dependent query scaling"
    if layer.k_scale is not None or layer.v_scale is not None:
        yield "scaled (quantised) keys or values"
    if layer.tp_q_head_num % layer.tp_k_head_num:
        yield f"{layer.tp_q_head_num} query heads over {layer.tp_k_head_num} key heads"


def check_call(extra: dict[str, Any]) -> None:
    """Refuse the arguments that some models pass to attention beside q, k and v (sinks, rope, sparse indices)."""
    given = [name for name, value in extra.items() if value is not None]
    if given:
        raise UnsupportedOnCPUError(f"tide-sglang-cpu's attention backend does not take {', '.join(given)}")
