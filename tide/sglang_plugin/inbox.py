"""The queue between the scheduler thread and the writer thread, bounded in bytes. Offering never waits."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Inbox:
    """A queue of items with a size in bytes; what does not fit is refused.

    Args:
        max_bytes: bound on queued items and on what the writer says it holds (``held``).
        reserve: further share of the bound for small items that must get through (ends of requests).
    """

    def __init__(self, max_bytes: int, reserve: float = 0.1) -> None:
        self._max, self._reserve = max_bytes, int(max_bytes * reserve)
        self._items: deque[tuple[Any, int]] = deque()
        self._ready = threading.Condition()
        self._queued = 0
        self.held = 0
        """Bytes that the writer took out and still holds; only the writer sets it."""

    @property
    def size(self) -> int:
        """Bytes queued and held."""
        return self._queued + self.held

    def offer(self, item: Any, size: int, *, urgent: bool = False) -> bool:
        """Queue an item. False when it does not fit."""
        with self._ready:
            if self.size + size > self._max + (self._reserve if urgent else 0):
                return False
            self._items.append((item, size))
            self._queued += size
            self._ready.notify()
            return True

    def take(self, timeout: float) -> Any | None:
        """The oldest item; None after ``timeout`` seconds without one."""
        with self._ready:
            if not self._items:
                self._ready.wait(timeout)
            if not self._items:
                return None
            item, size = self._items.popleft()
            self._queued -= size
            return item
