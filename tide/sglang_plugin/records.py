"""What the tap remembers of requests, and hands to the writer: plain values, nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tide.sglang_plugin.admission import Admission


@dataclass(frozen=True)
class OpenRequest:
    """A request between arrival and end."""

    serial: int
    admission: Admission
    started_at: float
    draft: str
    swaps: int


@dataclass(frozen=True)
class Span:
    """Where the tapped rows of one request stand in a step's gathered tensors."""

    rid: str
    serial: int
    kind: Literal["prefill", "verify"]
    row: int
    count: int
    position: int
    """Absolute position of the first row; known at launch for a prefill only."""
    end: int = 0
    """Prefill: the position after the chunk."""


@dataclass(frozen=True)
class Part:
    """Accepted rows of one request inside a step's tensors."""

    serial: int
    """The tap's own number of the request: a rid may come back, a serial does not."""
    position: int
    row: int
    count: int


@dataclass(frozen=True)
class StepRows:
    """Rows of one forward pass, on the host."""

    aux: torch.Tensor
    """[n, 3H]"""
    last: torch.Tensor
    """[n, H]"""
    parts: tuple[Part, ...]
    release: Callable[[], None] = field(default=lambda: None, repr=False)
    """Gives their memory back; the writer calls it once it has copied them."""

    @property
    def size(self) -> int:
        """Bytes, rejected rows included."""
        return self.aux.nbytes + self.last.nbytes

    @property
    def rows(self) -> int:
        """Accepted rows."""
        return sum(part.count for part in self.parts)


@dataclass(frozen=True)
class FinishedRequest:
    """A request that ended, in whatever way."""

    serial: int
    admission: Admission
    ids: Sequence[int]
    """Prompt and answer, through the stop token."""
    prompt_tokens: int
    cached_tokens: int
    started_at: float
    finished_at: float
    verify_steps: int | None
    proposed: int | None
    accepted: int | None
    temperature: float | None
    sampling: Literal["greedy", "sampled", "unknown"]
    draft: str
    finish_reason: str
    decode: Any = field(default=None, repr=False)
    """ids -> text, or None without a tokenizer."""

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return 512 + 8 * len(self.ids)


@dataclass(frozen=True)
class DropAll:
    """Every open request's rows are void."""

    reason: str


@dataclass(frozen=True)
class Evict:
    """One request's rows are void: it ended without an end that the tap saw."""

    serial: int
    reason: str
