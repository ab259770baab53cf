"""What all commands share: where the stack is, and its settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from infra import local
from tide import wiring
from tide.config import Settings

Home = Annotated[Path, typer.Option("--home", envvar="TIDE_HOME", help="Folder of everything local.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DEFAULT_HOME = Path(".tide")


def use_stack(home: Path) -> Settings:
    """Settings of the stack that runs in a home, under what the caller's environment says already."""
    for name, value in local.read_env(home).items():
        os.environ.setdefault(name, value)
    wiring.settings.cache_clear()
    return wiring.settings()
