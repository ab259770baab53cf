"""Rows of unfinished requests in host memory, addressed by position and bounded in bytes.

Owns buffers, eviction and the cut to the longest gap-free run. Knows nothing of requests but their key. One thread
uses it (the writer), so it takes no lock.

Position addressing is what makes retraction and repeated prefill harmless: a row that is computed again lands where
it was. A missing row is a gap, never a neighbour's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_ROWS = 64


@dataclass(frozen=True)
class Run:
    """Gap-free rows of one request; row i is absolute position ``first + i``."""

    first: int
    aux: torch.Tensor
    """[n, 3H]"""
    last: torch.Tensor
    """[n, H]"""
    lost: int
    """Rows held but outside the run, or beyond the end asked for."""


class _Entry:
    def __init__(self, base: int, capacity: int, aux: torch.Tensor, last: torch.Tensor, now: float) -> None:
        self.base, self.touched = base, now
        self.aux = torch.empty((capacity, aux.shape[1]), dtype=aux.dtype)
        self.last = torch.empty((capacity, last.shape[1]), dtype=last.dtype)
        self.have = bytearray(capacity)

    @property
    def size(self) -> int:
        return self.aux.nbytes + self.last.nbytes

    @property
    def rows(self) -> int:
        return sum(self.have)


class RowStore:
    """Byte-bounded rows, keyed (request serial, position).

    Args:
        max_bytes: what all buffers together may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._entries: dict[int, _Entry] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: int, position: int, aux: torch.Tensor, last: torch.Tensor, now: float) -> bool:
        """Keep rows ``position ..`` of a request; a row already there is overwritten.

        Args:
            aux: [n, 3H].
            last: [n, H], same n.
            now: any monotonic clock, seconds.

        Returns:
            False when there is no room: nothing of this call was kept, and what was held before is still there.

        Raises:
            ValueError: lengths or widths do not fit together, or the request's earlier rows.
        """
        count = aux.shape[0]
        if last.shape[0] != count or aux.dim() != 2 or last.dim() != 2:
            raise ValueError(f"rows do not fit together: aux {tuple(aux.shape)}, last {tuple(last.shape)}")
        entry = self._entries.get(key)
        if entry is None or position < entry.base or position + count > entry.base + len(entry.have):
            entry = self._grow(key, position, aux, last, now)
            if entry is None:
                return False
        low = position - entry.base
        entry.aux[low : low + count] = aux
        entry.last[low : low + count] = last
        entry.have[low : low + count] = b"\1" * count
        entry.touched = now
        return True

    def finish(self, key: int, end: int) -> Run | None:
        """Take a request out: its longest gap-free run of positions below ``end``. None when nothing is held."""
        entry = self._pop(key)
        if entry is None:
            return None
        low, high = _longest(entry.have, max(0, end - entry.base))
        if low == high:
            return None
        # A copy: the buffers are up to twice as large as what is kept.
        aux, last = entry.aux[low:high].clone(), entry.last[low:high].clone()
        return Run(entry.base + low, aux, last, entry.rows - (high - low))

    def discard(self, key: int) -> int:
        """Forget a request; returns the rows lost."""
        entry = self._pop(key)
        return 0 if entry is None else entry.rows

    def evict_idle(self, before: float) -> dict[int, int]:
        """Forget requests untouched since ``before``; returns rows lost by key."""
        idle = [key for key, entry in self._entries.items() if entry.touched < before]
        return {key: self.discard(key) for key in idle}

    def clear(self) -> int:
        """Forget everything; returns the rows lost."""
        return sum(self.discard(key) for key in list(self._entries))

    def _pop(self, key: int) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry.size
        return entry

    def _grow(self, key: int, position: int, aux: torch.Tensor, last: torch.Tensor, now: float) -> _Entry | None:
        """A buffer that covers the new rows as well, at least twice as large when it replaces another."""
        old, end = self._entries.get(key), position + aux.shape[0]
        base, top, held, least = position, end, 0, _FIRST_ROWS
        if old is not None:
            base, top = min(position, old.base), max(end, old.base + len(old.have))
            held, least = old.size, 2 * len(old.have)
        capacity = max(top - base, least)
        size = capacity * (aux.shape[1] * aux.element_size() + last.shape[1] * last.element_size())
        if self.size - held + size > self._max:
            return None
        entry = _Entry(base, capacity, aux, last, now)
        if old is not None:
            rows = slice(old.base - base, old.base - base + len(old.have))
            entry.aux[rows], entry.last[rows], entry.have[rows] = old.aux, old.last, old.have
        self.size += entry.size - held
        self._entries[key] = entry
        return entry


def _longest(have: bytearray, end: int) -> tuple[int, int]:
    """The longest stretch of ones in ``have[:end]``; the later one of two equals (answers stand at the end)."""
    best, start = (0, 0), 0
    for stretch in bytes(have[:end]).split(b"\0"):
        if stretch and len(stretch) >= best[1] - best[0]:
            best = (start, start + len(stretch))
        start += len(stretch) + 1
    return best
