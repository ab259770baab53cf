"""Every figure of the decision benchmarks: ``python -m tests.bench.decisions`` writes ``results/decisions.json``.

About twenty minutes on two cores, on the collected corpus (``data/``; ``collect`` makes a new one in an hour or two).
``--only`` measures some parts again and leaves the others as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.bench.decisions import cost, drift, live, pool, promotion

RESULTS = Path(__file__).parents[1] / "results" / "decisions.json"
PARTS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "promotion": promotion.measure,
    "drift": drift.measure,
    "offline_live": live.measure,
    "pool": lambda: {"pool": pool.measure()},
    "cost": lambda: {"cost": cost.measure()},
}


def main() -> None:
    """Measure, write after every part, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.only or PARTS:
        began = time.monotonic()
        result |= PARTS[name]()
        taken = result.setdefault("seconds", {})
        taken[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {taken[name]} s", flush=True)
        result["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        result["machine"] = {"cpus": os.cpu_count(), "machine": platform.machine()}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
