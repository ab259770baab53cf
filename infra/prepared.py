"""What ``infra.prepare`` made, for those who must not import what it imports."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

PREPARED_FILE = Path("models") / "prepared.json"
"""Below the home."""


class Prepared(BaseModel):
    """Folders that serving and training start from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """Target model."""
    draft: Path
    """Untrained draft."""
    bundle: Path
    """Head-only target: all that training needs of it."""
