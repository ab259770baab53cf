"""A Dockerfile as tests read it: its instructions, whole, in order."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction with everything that belongs to it."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its arguments as a shell splits them."""
        return shlex.split(self.text)


def instructions(file: Path) -> list[Instruction]:
    """Instructions of a Dockerfile: comments dropped, continued lines joined.

    Raises:
        ValueError: a line is no instruction.
    """
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in whole.splitlines():
        match = re.fullmatch(r"([A-Z]+)\s+(\S.*)", line)
        if match is None:
            raise ValueError(f"{file}: {line!r} is no instruction")
        found.append(Instruction(match[1], match[2]))
    return found
