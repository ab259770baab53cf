"""One finding of the doctor, and how a check that cannot be made is one too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from tide.domain import Value
from tide.errors import TideError


class Check(Value):
    """One finding."""

    name: str
    state: Literal["ok", "note", "wrong", "unknown"]
    """``note``: nothing is wrong, and yet somebody should know."""
    detail: str
    fix: str = ""


def guarded(name: str, check: Callable[[], Iterator[Check]]) -> list[Check]:
    """What a check found; one that fails is a finding as well, so that the others go on."""
    try:
        return list(check())
    except TideError as error:
        return [Check(name=name, state="unknown", detail=str(error), fix="mend this first, then run it again")]
