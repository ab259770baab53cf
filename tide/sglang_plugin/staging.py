"""Takes the tapped rows of a forward pass out of the engine's tensors into memory of their own.

Owns the copy that must happen before the engine may reuse its buffers. It runs on the stream that is current in the
worker (the forward stream), which is what orders it before the next replay of a captured graph. On a CPU the same
code is a plain copy. A ring of device stages and pinned host slots belongs behind ``take`` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def take(source: torch.Tensor, spans: Sequence[tuple[int, int]], total: int) -> torch.Tensor:
    """Rows of the spans, end to end, in new memory.

    Args:
        source: [m, width] on any device; may be a view of a captured graph's static storage.
        spans: (first row, count), ascending, not empty.
        total: sum of the counts.

    Returns:
        [total, width] on the same device.
    """
    first, last = spans[0][0], spans[-1][0] + spans[-1][1]
    if last - first == total:
        return source.narrow(0, first, total).clone()
    index = torch.cat([torch.arange(start, start + count) for start, count in spans])
    if source.device.type != "cpu":
        index = index.pin_memory().to(source.device, non_blocking=True)
    return source.index_select(0, index)


def take_at(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows at indices that only the device knows (accepted paths of a draft tree), in new memory.

    Args:
        source: [m, width].
        index: [n] int64 on the same device.
    """
    return source.index_select(0, index)
