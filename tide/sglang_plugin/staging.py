"""Memory of the tap's own that a forward pass's rows go into, before the engine may reuse its buffers.

Owns that memory and its bounds. A row's way: engine tensors -> stage, on the stream that is current in the worker (the
forward stream), which orders it before the next replay of a captured graph -> host, on SGLang's copy stream -> the
writer, which copies out and releases. A stage is written again only when the copy out of it is known to be over, and
nothing here waits for that: no room means rows dropped by the caller. Knows nothing of requests or positions.

`OwnStaging` allocates for each step and is what a CPU uses. `RingStaging` has a fixed number of stages and of pinned
host slots, so that a GPU's memory is taken once, before SGLang sizes its KV pool; it runs in tests on a CPU, and has
NOT BEEN VERIFIED ON A GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")
COPY_TENSOR = Callable[[torch.Tensor], torch.Tensor]
STAGES = 3
"""A step's stage is free again when its result was processed, one step later in the overlap loop; one is spare."""
HOST_SLOTS = 6


class HostRows(Protocol):
    """Rows on the host."""

    aux: torch.Tensor
    """[n, 3H]"""
    last: torch.Tensor
    """[n, H]"""

    def release(self) -> None:
        """The rows were copied out or are not wanted; call once."""


class Stage(Protocol):
    """Memory for the rows of one step, on the engine's device."""

    aux: torch.Tensor
    """[n, 3H]"""
    last: torch.Tensor
    """[n, H]"""

    def to_host(self, copy_tensor: COPY_TENSOR) -> HostRows | None:
        """Enqueue the copy on the current stream; None when no host memory is free. Release all the same."""

    def release(self) -> None:
        """The step's result was processed; call once."""


class Staging(Protocol):
    """Where stages come from."""

    def reserve(self, rows: int, aux: torch.Tensor, last: torch.Tensor) -> Stage | None:
        """A stage for ``rows`` rows of the widths and dtypes of ``aux`` and ``last``; None when there is no room."""


class OwnRows:
    """Stage and host rows in memory allocated for them; releasing is forgetting."""

    def __init__(self, aux: torch.Tensor, last: torch.Tensor) -> None:
        self.aux, self.last = aux, last

    def to_host(self, copy_tensor: COPY_TENSOR) -> OwnRows:
        """By SGLang's own copy function."""
        return OwnRows(copy_tensor(self.aux), copy_tensor(self.last))

    def release(self) -> None:
        """Nothing to do."""


class OwnStaging:
    """New memory for every step."""

    def reserve(self, rows: int, aux: torch.Tensor, last: torch.Tensor) -> OwnRows:
        """Always has room."""
        return OwnRows(aux.new_empty((rows, aux.shape[1])), last.new_empty((rows, last.shape[1])))


class RingStaging:
    """Fixed stages on the device and fixed host slots, each of ``stage_bytes``.

    Args:
        device: where the engine computes; host slots are pinned unless it is the CPU.
        stage_bytes: 32 MiB are 1,456 rows of gpt-oss-120b (23,040 bytes each).
    """

    def __init__(
        self, device: torch.device, stage_bytes: int, *, stages: int = STAGES, host_slots: int = HOST_SLOTS
    ) -> None:
        pinned = device.type != "cpu"
        self.bytes = stage_bytes
        blocks = (torch.empty(stage_bytes, dtype=torch.uint8, device=device) for _ in range(stages))
        # deque's ends are thread-safe: slots come back from the writer thread.
        self._stages = deque(_Block(block) for block in blocks)
        self._slots = deque(torch.empty(stage_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(host_slots))

    @property
    def free(self) -> tuple[int, int]:
        """Free stages and free host slots."""
        return len(self._stages), len(self._slots)

    def reserve(self, rows: int, aux: torch.Tensor, last: torch.Tensor) -> RingStage | None:
        """A free stage, if the rows fit into one."""
        layout = _Layout(rows, aux, last)
        if layout.bytes > self.bytes or (block := _take_one(self._stages)) is None:
            return None
        if not block.copied():
            self._stages.append(block)
            return None
        return RingStage(layout, block, self._stages, self._slots)


class RingStage:
    """One stage in use."""

    def __init__(self, layout: _Layout, block: _Block, home: deque[_Block], slots: deque[torch.Tensor]) -> None:
        self.aux, self.last = layout.views(block.memory)
        self._layout, self._block, self._home, self._slots = layout, block, home, slots

    def to_host(self, _copy_tensor: COPY_TENSOR) -> SlotRows | None:
        """One copy into a pinned slot; SGLang's own copy function would pin a new tensor at every step."""
        slot = _take_one(self._slots)
        if slot is None:
            return None
        used = self._layout.bytes
        slot[:used].copy_(self._block.memory[:used], non_blocking=True)
        self._block.mark()
        return SlotRows(self._layout, slot, self._slots)

    def release(self) -> None:
        """Back into the ring."""
        self._home.append(self._block)


class SlotRows:
    """Rows in a host slot."""

    def __init__(self, layout: _Layout, slot: torch.Tensor, home: deque[torch.Tensor]) -> None:
        self.aux, self.last = layout.views(slot)
        self._slot, self._home = slot, home

    def release(self) -> None:
        """Back into the ring."""
        self._home.append(self._slot)


class _Block:
    """A stage's memory, and the event after the last copy out of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._event = None if memory.device.type == "cpu" else torch.Event(memory.device)

    def mark(self) -> None:
        """A copy out was enqueued on the current stream."""
        if self._event is not None:
            self._event.record()

    def copied(self) -> bool:
        """True when it is over, or none was ever enqueued."""
        return self._event is None or bool(self._event.query())


class _Layout:
    """aux and last, end to end in one block of bytes."""

    def __init__(self, rows: int, aux: torch.Tensor, last: torch.Tensor) -> None:
        self._rows, self._aux, self._last = rows, (aux.shape[1], aux.dtype), (last.shape[1], last.dtype)
        aux_bytes = rows * aux.shape[1] * aux.element_size()
        self._at = -(-aux_bytes // 16) * 16  # a view of another dtype needs an aligned start
        self.bytes = self._at + rows * last.shape[1] * last.element_size()

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, 3H] and [rows, H] in the block."""
        return self._view(block, 0, *self._aux), self._view(block, self._at, *self._last)

    def _view(self, block: torch.Tensor, at: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        size = self._rows * width * dtype.itemsize
        return block[at : at + size].view(dtype).view(self._rows, width)


def staging_for(device: torch.device, stage_bytes: int) -> Staging:
    """`OwnStaging` for a CPU, `RingStaging` for anything else."""
    return OwnStaging() if device.type == "cpu" else RingStaging(device, stage_bytes)


def fill(target: torch.Tensor, source: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Copy rows of the spans, end to end.

    Args:
        target: [sum of counts, width].
        source: [m, width] on the same device; may be a view of a captured graph's static storage.
        spans: (first row, count), ascending, not empty.
    """
    first, last = spans[0][0], spans[-1][0] + spans[-1][1]
    if last - first == target.shape[0]:
        target.copy_(source.narrow(0, first, target.shape[0]))
        return
    index = torch.cat([torch.arange(start, start + count) for start, count in spans])
    if source.device.type != "cpu":
        index = index.pin_memory().to(source.device, non_blocking=True)
    torch.index_select(source, 0, index, out=target)


def fill_at(target: torch.Tensor, source: torch.Tensor, index: torch.Tensor) -> None:
    """Copy rows at indices that only the device knows (accepted paths of a draft tree).

    Args:
        target: [n, width].
        source: [m, width].
        index: [n] int64 on the same device.
    """
    torch.index_select(source, 0, index, out=target)


class LastStates:
    """One buffer for the post-norm rows of all captured graphs.

    Without it every captured shape keeps its own [tokens, H] alive: 250 MB at 512 requests of width 2,880. With it a
    graph's replay writes here, and the rows are copied out before the next.
    Register `shrink` in ``ModelRunner.capture_tail_hooks``. NOT VERIFIED ON A GPU.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def shrink(self, runner: Any, output: Any, _forward_batch: Any, _tokens: int) -> None:
        """Called while a graph is captured, at its end: the copy becomes part of the graph."""
        states = getattr(output, "last_hidden_states", None)
        if states is None:
            return
        if self._buffer is None or self._buffer.shape[1:] != states.shape[1:]:
            self._buffer = states.new_empty((runner.max_num_token, *states.shape[1:]))
        kept = self._buffer[: states.shape[0]]
        kept.copy_(states)
        output.last_hidden_states = kept


def _take_one(ring: deque[T]) -> T | None:
    try:
        return ring.popleft()
    except IndexError:
        return None
