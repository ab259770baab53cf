"""Which windows of states stay on main: the newest within the policy's limits, and those that live drafts name.

Pure: values in, value out. Knows nothing of stores, of clocks or of how anything is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tide.config import RetentionPolicy
from tide.domain import Record, Value


class StoredWindow(Value):
    """A window on main, of all replicas."""

    window: str
    """Its start, ``20261130T042000Z``: names sort by time."""
    size: int
    """Bytes of its objects."""


class Kept(Value):
    """One window and what the policy says of it."""

    window: str
    size: int
    keep: bool
    why: str


class RetentionPlan(Record):
    """What stays and what goes, newest first."""

    windows: tuple[Kept, ...]
    over_bytes: int
    """Bytes above ``max_bytes`` that stay because live drafts name them."""

    @property
    def removed(self) -> tuple[Kept, ...]:
        """Windows that go, oldest first."""
        return tuple(kept for kept in reversed(self.windows) if not kept.keep)


def decide(
    windows: Sequence[StoredWindow], named: Mapping[str, Sequence[str]], policy: RetentionPolicy
) -> RetentionPlan:
    """Apply the policy.

    Windows that live drafts name are counted against ``max_bytes`` first; the others fill what is left of it, newest
    first, up to the first that does not fit: what stays of them is one stretch of time. So nothing above the budget
    stays but what a live draft names.

    Args:
        named: by window, the drafts that were trained on it and may not lose it.
    """
    newest_first = sorted(windows, key=lambda w: w.window, reverse=True)
    pinned = sum(w.size for w in windows if named.get(w.window))
    left = None if policy.max_bytes is None else policy.max_bytes - pinned
    decided, full = [], ""
    for place, window in enumerate(newest_first):
        drafts = named.get(window.window)
        if drafts:
            why = f"draft {', '.join(d[:12] for d in drafts)} was trained on it"
            decided.append(Kept(window=window.window, size=window.size, keep=True, why=why))
            continue
        full = full or _limit(place, window.size, left, policy)
        if not full and left is not None:
            left -= window.size
        decided.append(Kept(window=window.window, size=window.size, keep=not full, why=full or "within the limits"))
    over = 0 if policy.max_bytes is None else max(0, pinned - policy.max_bytes)
    return RetentionPlan(windows=tuple(decided), over_bytes=over)


def _limit(place: int, size: int, left: int | None, policy: RetentionPolicy) -> str:
    """The limit that a window is beyond; nothing when it is within all."""
    if policy.keep_windows is not None and place >= policy.keep_windows:
        return f"beyond the newest {policy.keep_windows} windows"
    if left is not None and size > left:
        return f"beyond {policy.max_bytes} bytes"
    return ""


def to_markdown(plan: RetentionPlan, policy: RetentionPolicy) -> str:
    """A table of every window, newest first, and what is over the budget."""
    gone, stay = plan.removed, [w for w in plan.windows if w.keep]
    lines = [
        f"## {len(gone)} windows leave main, {len(stay)} stay",
        "",
        f"{sum(w.size for w in gone)} bytes leave, {sum(w.size for w in stay)} stay; "
        f"lakeFS may collect what left after {policy.collect_after_days} days.",
    ]
    if plan.over_bytes:
        lines += ["", f"**{plan.over_bytes} bytes over max_bytes stay, because live drafts were trained on them.**"]
    lines += ["", "| window | bytes | | why |", "|---|---|---|---|"]
    lines += [f"| {w.window} | {w.size} | {'kept' if w.keep else 'removed'} | {w.why} |" for w in plan.windows]
    return "\n".join(lines)
