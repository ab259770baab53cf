"""Puts the CPU attention backend, and optionally the overlap loop, into SGLang; and makes sure that it arrived.

Owns: which names of SGLang 0.5.23 are hooked, and the two checks: at load that the names still mean what we expect, and
when the server builds its attention backend that every hook is really in place. Does not know: attention.
"""

import inspect
import logging
import pkgutil
import platform
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tide_sglang_cpu import packing

log = logging.getLogger(__name__)

BACKEND = "torch_native"  # what SGLang falls back to on a CPU without AMX
CREATE_BACKEND = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
NO_OVERLAP = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
GATHER_EXTRAS = "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras"


class IncompatibleSGLangError(RuntimeError):
    """This SGLang does not have, or did not take, a name that the CPU plugin hooks."""


def install(*, overlap: bool) -> None:
    """Register the backend and its hooks. Raises IncompatibleSGLangError if a hooked name is gone or changed.

    SGLang applies hooks after all plugins have registered and only logs those that fail, so `make_backend` checks them
    again: without them the scheduler does not start.
    """
    if BACKEND not in attention_registry.ATTENTION_BACKENDS:
        raise IncompatibleSGLangError(
            f"SGLang has no attention backend {BACKEND!r} to replace; this plugin is for 0.5.23"
        )
    hooks: list[tuple[str, Callable[..., Any], HookType, list[str]]] = [
        (CREATE_BACKEND, _create_draft_backend, HookType.AROUND, ["backend_map", "stamps_children"]),
    ]
    if overlap:
        hooks += [
            (NO_OVERLAP, _leave_overlap_on, HookType.REPLACE, ["server_args"]),
            (GATHER_EXTRAS, _gather_spec_extras, HookType.REPLACE, ["indices", "hidden_states_buf"]),
        ]
    for target, hook, kind, needed in hooks:
        _check_target(target, needed)
        HookRegistry.register(target, hook, kind)
    targets = [target for target, *_ in hooks]

    def make_backend(runner: Any) -> Any:
        check_applied(targets)
        _warn_of_emulated_bfloat16(runner.dtype)
        from tide_sglang_cpu.attention import CPUAttentionBackend  # SGLang's pools: too early at plugin load

        packing.pack(runner.model)
        return CPUAttentionBackend(runner)

    attention_registry.ATTENTION_BACKENDS[BACKEND] = make_backend


def _warn_of_emulated_bfloat16(dtype: torch.dtype) -> None:
    if (
        dtype is torch.bfloat16
        and platform.machine() == "x86_64"
        and not torch.cpu._is_avx512_bf16_supported()  # torch offers it under no public name
    ):
        log.warning("This CPU has no bfloat16 instructions: serving with --dtype float32 is 2 to 4 times faster.")


def _check_target(target: str, needed: list[str]) -> None:
    try:
        found = _resolve(target)
    except (ImportError, AttributeError) as e:
        raise IncompatibleSGLangError(f"{target} cannot be hooked ({e}); this plugin is for SGLang 0.5.23") from e
    parameters = inspect.signature(found).parameters
    missing = [name for name in needed if name not in parameters]
    if missing:
        raise IncompatibleSGLangError(
            f"{target} has no parameter {', '.join(missing)}; this plugin is for SGLang 0.5.23"
        )


def _resolve(target: str) -> Any:
    return pkgutil.resolve_name(target)


def check_applied(targets: list[str]) -> None:
    """Raise IncompatibleSGLangError unless every target is hooked in this process."""
    lost = [t for t in targets if t not in HookRegistry._patched or not hasattr(_resolve(t), "__wrapped__")]
    if lost:
        raise IncompatibleSGLangError(
            f"hooks were not applied: {', '.join(lost)}. SGLang's log has the reason above ('Failed to apply hooks'); "
            "without them drafting on this CPU would be wrong or absent, so the server does not start."
        )


def _create_draft_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], Any]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Add our draft backends to the ones SGLang chooses from; `stamps_children` marks the multi-step container."""
    from tide_sglang_cpu.attention import CPUAttentionBackend, MultiStepDraftBackend

    runner = factory.draft_model_runner
    packing.pack(runner.model)

    def make() -> tuple[str, Any]:
        if stamps_children:
            return BACKEND, MultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return BACKEND, CPUAttentionBackend(runner)

    return original(factory, backend_name, {**backend_map, BACKEND: make}, error_template, stamps_children)


def _leave_overlap_on(server_args: Any) -> None:
    """SGLang turns the overlap loop off here, for want of the one gather below."""


def _gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The rows `indices` of each buffer; SGLang's is a triton kernel."""
    rows = indices.long()
    hidden = None if hidden_states_buf is None else hidden_states_buf[rows]
    return topk_p_buf[rows], topk_index_buf[rows], output_tokens_buf[rows], hidden
