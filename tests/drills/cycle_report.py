"""One round of the operator's drill as planned and as it went, and what all of them come to."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.drills.cycle_books import Books

STAND_INS = "engine (its draft in a file), trainer (a process group that trains nothing), evaluator; all else is real"


@dataclass(frozen=True)
class Kill:
    """One round's plan."""

    number: int
    victim: str
    boundary: str | None
    """``before NAME`` or ``after NAME``; None: a random moment."""


@dataclass
class Round:
    """What came of it."""

    number: int
    victim: str
    boundary: str | None
    landed: bool
    """False when there was nothing to kill any more."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def report(books: Books, done: list[Round], seed: int) -> dict[str, Any]:
    """What is written down."""
    faults = Counter[str]()
    for made in done:
        faults.update({kind: len(lines) for kind, lines in made.faults.items()})
    found = books.read_back()
    landed = [made for made in done if made.landed]
    return {
        "kills": len(landed),
        "half_promoted": faults["half_promoted"],
        "lost_shards": len(found.lost),
        "doubled_shards": len(found.doubled),
        "double_trainings": len(books.double_trainings()),
        "leaked_slots": faults["leaked_slots"],
        "incomplete": faults["incomplete"],
        "left_behind": faults["left_behind"],
        "victims": dict(sorted(Counter(made.victim for made in landed).items())),
        "at_boundaries": sum(made.boundary is not None for made in landed),
        "missed": len(done) - len(landed),
        "shards": found.shards,
        "trainings": len(books.trained()),
        "round_s": round(statistics.median(made.seconds for made in done), 1) if done else None,
        "stand_ins": STAND_INS,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
    }
