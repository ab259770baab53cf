"""The operator's fault drill: whatever is killed, wherever it is, the next cycle finishes and nothing is half-done.

A cycle (harvest, drift, train, judge, promote) runs on a real Prefect server with real workers and a real lakeFS. In
each round one of its processes gets SIGKILL: the flow's, the worker, the trainer, a replica, the store or the Prefect
server; at a step boundary, or at a random moment. What was killed is started again, `reconcile` runs, the next cycle
must complete, and the books must balance. Engine, trainer and evaluator are stand-ins (tests/support/standins.py): the
result says so.

    python -m tests.drills.cycle [--kills 50] [--victim NAME] [--boundaries] [--seed 1] [--home DIR] [--out FILE]

With ``--home`` a drill that was broken off, or ran for its ``--minutes M``, goes on where it was; one that is through
begins anew. With ``--part 1/2`` every second round, the others on another home and at the same time; then
`tests.drills.cycle_report` puts the parts together. Exit code 1 when something was lost, doubled, leaked or half-made,
or a cycle after a kill did not complete.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.bench.operate_results import merge
from tests.drills.cycle_report import REPORT, ROUNDS, WRONG, Kill, Round, report, rounds
from tests.drills.cycle_round import Drill
from tests.support.operating import pipeline
from tide.files import write_durably

VICTIMS = ("flow", "worker", "trainer", "replica", "store", "server")
PLAN = "plan.json"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def plans(drill: Drill, kills: int, boundaries: bool, seed: int, victims: Sequence[str] = VICTIMS) -> list[Kill]:
    """A flow's death at every boundary, with every other victim somewhere among them, and random moments.

    In random order, so that a drill which is broken off has seen some of each. A trainer lives within one step: it is
    killed while it trains, not at a boundary.
    """
    kinds: list[tuple[str, str | None]] = [(victims[i % len(victims)], None) for i in range(kills)]
    if boundaries:
        others = [victim for victim in VICTIMS if victim not in ("flow", "trainer")]
        for place, boundary in enumerate(drill.stages):
            kinds += [("flow", boundary), (others[place % len(others)], boundary)]
    random.Random(seed).shuffle(kinds)
    return [Kill(number, *kind) for number, kind in enumerate(kinds)]


def run(drill: Drill, args: argparse.Namespace) -> tuple[list[Round], int]:
    """All rounds of this part that are not in the home's log yet, with progress; and how many are planned."""
    file: Path = args.home / ROUNDS
    done = rounds(args.home)
    wanted = remembered(args, plans(drill, args.kills, args.boundaries, args.seed, args.victim or VICTIMS))
    begun, before = time.monotonic(), len(done)
    for plan in wanted[before:]:
        if args.minutes is not None and time.monotonic() - begun > 60 * args.minutes:
            print(f"{len(wanted) - len(done)} rounds are left: go on with --home {args.home}", flush=True)
            break
        made = drill.round(plan)
        done.append(made)
        with file.open("a") as log:
            log.write(json.dumps(asdict(made)) + "\n")
        spent = time.monotonic() - begun
        togo = spent / (len(done) - before) * (len(wanted) - len(done))
        where = plan.boundary or "somewhere"
        faults = "; ".join(line for lines in made.faults.values() for line in lines) or "well"
        print(f"{len(done)}/{len(wanted)} {plan.victim} {where}: {faults}; {togo:.0f} s to go", flush=True)
    return done, len(wanted)


def remembered(args: argparse.Namespace, made: list[Kill]) -> list[Kill]:
    """The plan that a drill on this home began with: one that goes on has seen more boundaries by then."""
    file: Path = args.home / PLAN
    asked = {"seed": args.seed, "kills": args.kills, "boundaries": args.boundaries, "part": args.part}
    asked |= {"victims": args.victim} if args.victim else {}
    if not file.exists():
        place, parts = map(int, args.part.split("/"))
        mine = [asdict(kill) for kill in made if kill.number % parts == place - 1]
        write_durably(file, json.dumps({"asked": asked, "rounds": mine}).encode())
    plan = json.loads(file.read_text())
    if plan["asked"] != asked:
        sys.exit(
            f"{args.home} holds a drill that was asked for {plan['asked']}: go on with these, or take another home"
        )
    return [Kill(**kill) for kill in plan["rounds"]]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="at random moments")
    parser.add_argument("--victim", action="append", choices=VICTIMS, help="at random moments only these; repeatable")
    parser.add_argument("--boundaries", action="store_true", help="and at every step boundary")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--home", type=Path, default=None)
    parser.add_argument("--part", default="1/1", help="I/N: every N-th round, from the I-th; needs --home")
    parser.add_argument("--minutes", type=float, default=None, help="begin no round after so long; needs --home")
    parser.add_argument("--out", type=Path, default=None, help="default: tests/bench/results/operate.json")
    args = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", args.part) or int(args.part.split("/")[0]) > int(args.part.split("/")[1]):
        parser.error(f"--part {args.part} is not I/N with I from 1 to N")
    if args.home is None and (args.minutes is not None or args.part != "1/1"):
        parser.error("--minutes and --part leave something for later, or for elsewhere: say where with --home DIR")
    return args


def main() -> None:
    """Run, read back, write, print."""
    args = parsed()
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    with tempfile.TemporaryDirectory() as scratch:
        args.home = home = (args.home or Path(scratch)).absolute()
        home.mkdir(parents=True, exist_ok=True)
        if begins_anew(home):
            print(f"the drill on {home} is through: another begins", flush=True)
        with pipeline(home, train_s=2.0) as pipe:
            drill = Drill(pipe, random.Random(args.seed + pipe.windows))
            drill.begin()
            drill.calm(1 if rounds(home) else 3)
            done, planned = run(drill, args)
            result = report(drill.books, done, args.seed) | {"planned": planned}
        write_durably(home / REPORT, json.dumps(result).encode())
        if args.part == "1/1":
            merge({"drill": result} if planned else {}, args.out)
    # A calm cycle less the two seconds that the stand-in trains; beside another part it says nothing.
    if args.part == "1/1":
        name = (
            "orchestration_postgresql_s" if os.environ.get(DATABASE, "").startswith("postgresql") else "orchestration_s"
        )
        merge({name: round(statistics.median(drill.took) - 2.0, 1)}, args.out)
    print(json.dumps(result))
    sys.exit(int(any(result[name] for name in WRONG)))


def begins_anew(home: Path) -> bool:
    """Put the plan of a drill that is through aside; its report is written."""
    file = home / PLAN
    if not file.exists() or len(rounds(home)) < len(json.loads(file.read_text())["rounds"]):
        return False
    file.unlink()
    (home / ROUNDS).unlink(missing_ok=True)
    return True


if __name__ == "__main__":
    main()
