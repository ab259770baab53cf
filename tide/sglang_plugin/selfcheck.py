"""The start-up check: configurations in which the tap would be wrong in silence, and hooks that did not take.

SGLang only logs a hook that cannot be applied, and a plugin that fails. Both would mean a server that looks healthy
and captures nothing, or the wrong rows. Here each becomes a server that does not start, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from tide.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused, and what to do about it."""

    name: str
    applies: Callable[[Any], bool]
    reason: str


def _value(args: Any, name: str, default: Any = None) -> Any:
    return getattr(args, name, default)


REFUSALS = (
    Refusal(
        "speculative_algorithm",
        lambda a: _value(a, "speculative_algorithm") != "EAGLE3",
        "captured states are those of an EAGLE3 draft: start with --speculative-algorithm EAGLE3 and a draft",
    ),
    Refusal(
        "enable_multi_layer_eagle",
        lambda a: bool(_value(a, "enable_multi_layer_eagle")),
        "the multi-layer worker verifies in another way than the tap follows",
    ),
    Refusal(
        "decoupled_spec_role",
        lambda a: _value(a, "decoupled_spec_role", "null") not in (None, "null"),
        "decoupled speculation drafts in another process: the worker that verifies is not the one followed",
    ),
    Refusal(
        "pp_size", lambda a: _value(a, "pp_size", 1) > 1, "pipeline parallelism: the last stage alone sees its layers"
    ),
    Refusal(
        "disaggregation_mode",
        lambda a: _value(a, "disaggregation_mode", "null") not in (None, "null"),
        "prefill/decode disaggregation: neither side sees the whole request",
    ),
    Refusal(
        "attn_cp_size",
        lambda a: _value(a, "attn_cp_size", 1) > 1 or _value(a, "dcp_size", 1) > 1,
        "context parallelism: a rank sees slices of rows",
    ),
    Refusal(
        "enable_attn_tp_input_scattered",
        lambda a: bool(_value(a, "enable_attn_tp_input_scattered")),
        "scattered attention inputs: a rank sees slices of rows",
    ),
    Refusal(
        "attn_dp_size",
        lambda a: _value(a, "attn_dp_size", 1) > 1 or bool(_value(a, "enable_dp_attention")),
        "data-parallel attention pads batches in ways not yet verified on a GPU",
    ),
    Refusal(
        "enable_two_batch_overlap",
        lambda a: bool(_value(a, "enable_two_batch_overlap")),
        "two-batch overlap interleaves the rows of two batches",
    ),
    Refusal("enable_pdmux", lambda a: bool(_value(a, "enable_pdmux")), "PD multiplexing has its own result path"),
    Refusal("dllm_algorithm", lambda a: bool(_value(a, "dllm_algorithm")), "diffusion models have no next token"),
    Refusal("is_embedding", lambda a: bool(_value(a, "is_embedding")), "an embedding model generates nothing"),
    Refusal(
        "device",
        lambda a: _value(a, "device") not in ("cuda", "cpu", None),
        "only the CUDA/ROCm and CPU engines are followed",
    ),
)


def refuse_configuration(server_args: Any) -> None:
    """Check the engine's configuration.

    Raises:
        ConfigError: names every setting at fault, with its reason.
    """
    found = [f"{r.name}={_value(server_args, r.name)!r}: {r.reason}" for r in REFUSALS if r.applies(server_args)]
    if found:
        raise ConfigError(
            "tide cannot capture in this configuration: "
            + "; ".join(found)
            + ". Change it, or unset TIDE_SPOOL_DIR to serve without capture."
        )


def require_resolvable(targets: Iterable[str]) -> None:
    """Check, before hooks are applied, that each target exists.

    Raises:
        ConfigError: names the targets that this SGLang does not have.
    """
    missing = [target for target in targets if not _exists(target)]
    if missing:
        raise ConfigError(f"this SGLang is not one that tide supports: it has no {', '.join(missing)}")


def require_applied(registry: Any, targets: Iterable[str]) -> None:
    """Check that each hook was really applied.

    Raises:
        ConfigError: names those that were not.
    """
    missing = sorted(set(targets) - set(registry._patched))
    if missing:
        raise ConfigError(f"hooks not applied: {', '.join(missing)}; the engine's log has the exception of each")


def require_flagged(flagged: int) -> None:
    """Check that the target hands out its last hidden states.

    Raises:
        ConfigError: no LogitsProcessor was found in the target model.
    """
    if flagged < 1:
        raise ConfigError("the target model has no LogitsProcessor: its last hidden states cannot be captured")


def _exists(target: str) -> bool:
    try:
        resolve_name(target.replace(":", "."))
    except (ImportError, AttributeError, ValueError):
        return False
    return True
