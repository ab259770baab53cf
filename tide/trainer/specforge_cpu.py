"""What SpecForge needs replaced to run on a CPU: the loss, whose kernel is for GPUs only, and the bfloat16 teacher.

Everything else in SpecForge supports a CPU by itself. Knows nothing of TIDE's data or rules, nor of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install() -> None:
    """Put plain PyTorch, float32 and supervised rows only, where SpecForge has GPU kernels or bfloat16 arithmetic."""
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core import compact_teacher, loss

    _require(eagle3, "LogSoftmaxLoss", "compute_target_p_padded_from_hidden")
    _require(loss, "LogSoftmaxLoss")
    _require(compact_teacher, "compute_target_from_hidden")
    loss.LogSoftmaxLoss = eagle3.LogSoftmaxLoss = _loss_class()
    eagle3.compute_target_p_padded_from_hidden = _teacher(compact_teacher.compute_target_from_hidden)


def _require(module: ModuleType, *names: str) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise SystemExit(f"{module.__name__} has no {', '.join(missing)}: this shim was written for specforge 0.2.0")


def _loss_class() -> type:
    from torch.nn.functional import log_softmax

    class LogSoftmaxLoss:
        """Cross entropy against a distribution, masked, averaged over ALL positions, in float32."""

        @staticmethod
        def apply(logits: torch.Tensor, target: torch.Tensor, position_mask: torch.Tensor) -> torch.Tensor:
            """Logits and target [B, T, V], mask [B, T, 1]; rows outside the mask are not computed: they count 0."""
            rows = position_mask.squeeze(-1).bool()
            losses = -(target[rows].float() * log_softmax(logits[rows].float(), dim=-1)).sum(-1)
            return losses.sum() / rows.numel()

    return LogSoftmaxLoss


def _teacher(compute: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The target's distributions, in float32 and for supervised rows alone; the others are masked out of every use.

    SpecForge keeps the target's head in bfloat16, which a CPU without bfloat16 instructions multiplies many times
    slower than float32.
    """
    import torch

    heads: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def compute_padded(
        hidden: torch.Tensor,
        lm_head_weight: torch.Tensor,
        t2d: torch.Tensor,
        loss_mask: torch.Tensor,
        length: int,
        *,
        chunk_size: int,
    ) -> tuple[torch.Tensor, ...]:
        """Hidden [B, S, H], mask [B, S, 1] -> p, p on draft ids [B, S + length, DV], ids [B, S + length], mask."""
        head = heads.setdefault(lm_head_weight.data_ptr(), lm_head_weight.float())
        rows = loss_mask.squeeze(-1).bool()
        found = compute(hidden[rows].float(), head, t2d, loss_mask[rows], chunk_size=chunk_size)
        batch, positions = rows.shape
        wide = (batch, positions + length)
        size = found[0].shape[-1]
        p, on_draft = torch.full((*wide, size), 1 / size), torch.zeros(*wide, size)
        ids, mask = torch.zeros(wide, dtype=torch.long), torch.zeros_like(loss_mask)
        p[:, :positions][rows], on_draft[:, :positions][rows] = found[0], found[1]
        ids[:, :positions][rows], mask[rows] = found[2], found[3].to(mask.dtype)
        return p, on_draft, ids, mask

    return compute_padded
