"""What Linux tells of a process, as text: read by whoever must know whether it is still the one it was.

Owns how the files under /proc are taken apart. Decides nothing, and ends nothing.
"""

from __future__ import annotations

from pathlib import Path

STATE, GROUP, START = 0, 2, 19
"""Places in ``status``: the state's letter, the process group, the start in clock ticks since boot (proc(5))."""


def status(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` from the third on, the state. Raises OSError when there is no such process."""
    # The command, field 2, may itself hold spaces and brackets: count from behind it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def environment(pid: int) -> list[bytes]:
    """``NAME=VALUE`` that a process was started with. Raises OSError when it is gone, or another user's."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
