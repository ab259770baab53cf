"""The compose file as tests read it: its names filled in, its servers' names changed for loopback addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "infra" / "compose"
_NAME = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")


def services() -> dict[str, Any]:
    """Services of the file by name, as written."""
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"])


def filled(value: str, secrets: Mapping[str, str]) -> str:
    """A value with ``${NAME}``, ``${NAME:?message}`` and ``${NAME:-default}`` replaced as compose does it.

    Raises:
        KeyError: a name without a default is not among the secrets.
    """
    return _NAME.sub(lambda m: secrets.get(m[1]) or m[3] if m[2] == "-" else secrets[m[1]], value)


def environment(service: str, secrets: Mapping[str, str], addresses: Mapping[str, str]) -> dict[str, str]:
    """Environment of a service.

    Args:
        addresses: what stands for ``host:port`` of another service of the file.
    """
    found = {name: filled(str(value), secrets) for name, value in services()[service]["environment"].items()}
    for name, address in addresses.items():
        found = {key: value.replace(name, address) for key, value in found.items()}
    return found
