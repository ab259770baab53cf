"""The figures of operating, in one file that several drills and benches write: each its own keys, none another's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tide.files import write_durably

RESULT = Path(__file__).parent / "results" / "operate.json"


def merge(figures: Mapping[str, Any], file: Path | None = None) -> Path:
    """Put these keys into the file; what else stands there stays."""
    path = file or RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    write_durably(path, (json.dumps({**known, **figures}, indent=1, sort_keys=True) + "\n").encode())
    return path
