"""Names by which a drill and the flows it breaks speak to each other: of files and of plain flows; imports nothing."""

from __future__ import annotations

LOG, HOLD = "boundaries.log", "hold_at"
PLAIN = ("fails-once", "waits", "sleeps")
