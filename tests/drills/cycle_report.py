"""One round of the operator's drill as planned and as it went, and what all of them come to.

    python -m tests.drills.cycle_report HOME [HOME ...] [--out FILE]

puts parts of a drill together, each of which ran on its own home.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.operate_results import merge
from tests.drills.cycle_books import Books

ROUNDS, REPORT = "rounds.jsonl", "report.json"
WRONG = ("half_promoted", "lost_shards", "doubled_shards", "double_trainings", "leaked_slots", "incomplete")
COUNTED = ("kills", *WRONG, "left_behind", "at_boundaries", "missed", "shards", "trainings", "planned")

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


def rounds(home: Path) -> list[Round]:
    """The rounds that a home has seen, in their order."""
    file = home / ROUNDS
    return [Round(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def together(homes: list[Path]) -> dict[str, Any]:
    """One report of the parts on these homes, which ran beside each other."""
    parts = [json.loads((home / REPORT).read_text()) for home in homes]
    victims = Counter[str]()
    for part in parts:
        victims.update(part["victims"])
    counted = {name: sum(part[name] for part in parts) for name in COUNTED}
    taken = [made.seconds for home in homes for made in rounds(home)]
    more = {"victims": dict(sorted(victims.items())), "round_s": round(statistics.median(taken), 1)}
    return parts[0] | counted | more | {"parts": len(parts)}


def main() -> None:
    """Read the parts, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("homes", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=None, help="default: tests/bench/results/operate.json")
    args = parser.parse_args()
    result = together(args.homes)
    merge({"drill": result}, args.out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
