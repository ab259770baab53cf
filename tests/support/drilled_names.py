"""Names of the files by which a drill and the flows it breaks speak to each other; imports nothing."""

from __future__ import annotations

LOG, HOLD = "boundaries.log", "hold_at"
