"""Where the figures of operating TIDE are kept: ``results/operate.json``; every measurement adds keys of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "operate.json"


def record(figures: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Put figures beside those of others; a group of the same name is merged too."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name, value in figures.items():
        old = found.get(name)
        found[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
