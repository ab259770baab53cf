"""The operator's fault drill: whatever is killed, wherever it is, the next cycle finishes and nothing is half-done.

A cycle (harvest, drift, train, judge, promote) runs on a real Prefect server with real workers and a real lakeFS. In
each round one of its processes gets SIGKILL: the flow's, the worker, the trainer, a replica, the store or the Prefect
server; at a step boundary, or at a random moment. What was killed is started again, `reconcile` runs, the next cycle
must complete, and the books must balance. Engine, trainer and evaluator are stand-ins (tests/support/standins.py): the
result says so.

    python -m tests.drills.cycle [--kills 50] [--boundaries] [--seed 1] [--home DIR] [--minutes M] [--out FILE]

With ``--home`` a drill that was broken off, or ran for its ``--minutes``, goes on where it was; one that is through
begins anew. With ``--part 1/2`` every second round, the others on another home and at the same time; then
`tests.drills.cycle_report` puts the parts together. Exit code 1 when something was lost, doubled, leaked or half-made,
or a cycle after a kill did not complete.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.operate_results import merge
from tests.drills.cycle_books import Books
from tests.drills.cycle_report import REPORT, ROUNDS, WRONG, Kill, Round, report, rounds
from tests.support.drilled_names import HOLD
from tests.support.operated import BEAT_S, IMPATIENT, Pipeline, kill, wait_for
from tests.support.operating import pipeline
from tide.files import write_durably

VICTIMS = ("flow", "worker", "trainer", "replica", "store", "server")
PLAN = "plan.json"
RUN_S = 600.0


@dataclass
class Drill:
    """The pipeline, and how long a cycle takes here when nobody disturbs it."""

    pipe: Pipeline
    rng: random.Random
    took: list[float] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    @property
    def books(self) -> Books:
        """What must be true when nothing is at work."""
        return Books(self.pipe)

    def begin(self) -> None:
        """A drill that was broken off left runs without a process, with their slots, and perhaps a boundary held."""
        (self.pipe.home / HOLD).unlink(missing_ok=True)
        if self.pipe.waiting():
            faults = self._settle()
            assert not faults, f"{faults}: see {self.pipe.home}/logs"

    def calm(self, rounds: int) -> None:
        """Cycles without a kill: the step boundaries, and the time of a cycle."""
        for _ in range(rounds):
            self.pipe.fill()
            began = time.monotonic()
            state = self._cycle()
            assert state == "COMPLETED", f"a calm cycle ended {state}: see {self.pipe.home}/logs"
            self.took.append(time.monotonic() - began)
        told = [line.split(" ", 1)[1] for line in self.pipe.boundaries()]
        self.stages = list(dict.fromkeys(line for line in told if not line.startswith("held ")))

    def round(self, plan: Kill) -> Round:
        """Break a cycle, mend, run the next one, and look."""
        began, pipe = time.monotonic(), self.pipe
        pipe.fill()
        if plan.boundary:
            (pipe.home / HOLD).write_text(plan.boundary)
        seen = len(pipe.boundaries())
        first = pipe.run("adapt/adapt", force=True)
        if plan.boundary:
            held = f"held {plan.boundary}"
            wait_for(lambda: any(held in x for x in pipe.boundaries()[seen:]) or self._over(first), RUN_S)
        else:
            time.sleep(self.rng.uniform(0, statistics.median(self.took[-5:])))
        landed = self._kill(plan, first)
        (pipe.home / HOLD).unlink(missing_ok=True)
        faults = self._settle()
        state = self._cycle()
        if state != "COMPLETED":
            faults.setdefault("incomplete", []).append(f"round {plan.number}: the next cycle ended {state}")
        for kind, lines in self.books.faults().items():
            faults.setdefault(kind, []).extend(f"round {plan.number} ({plan.victim}): {line}" for line in lines)
        return Round(plan.number, plan.victim, plan.boundary, landed, faults, round(time.monotonic() - began, 1))

    def _cycle(self) -> str:
        """One forced cycle and all that it starts; the type of its last state."""
        run = self.pipe.run("adapt/adapt", force=True)
        state = self.pipe.finished(run, RUN_S)
        wait_for(lambda: not self.pipe.waiting(), RUN_S)
        return state

    def _over(self, run: str) -> bool:
        """The cycle has ended, and so has the promotion that it started."""
        return self.pipe.state(run) in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"} and not self.pipe.waiting()

    def _kill(self, plan: Kill, first: str) -> bool:
        """False when it was over before, or there was nothing of the kind."""
        pipe = self.pipe
        if self._over(first):
            return False
        if plan.victim == "flow":
            if not (flows := pipe.flows()):
                return False
            # At a boundary the one that is held; else any, the cycle's or the training's.
            held = [line for line in pipe.boundaries() if line.split(" ", 1)[1] == f"held {plan.boundary}"]
            pid = int(held[-1].split()[0]) if held and plan.boundary else self.rng.choice(list(flows.values())).pid
            kill(pid)
        elif plan.victim == "worker":
            pool = self.rng.choice(["cpu", "mi250"])
            pipe.kill_worker(pool)
            pipe.start_worker(pool)
        elif plan.victim == "trainer":
            if not (ranks := pipe.trainers()):
                return False
            kill(self.rng.choice(ranks).pid)
        elif plan.victim == "replica":
            pipe.restart_replica(self.rng.choice(["r0", "r1"]))
        elif plan.victim == "store":
            pipe.kill_store()
        else:
            pipe.kill_server()
            pipe.start_server()
        return True

    def _settle(self) -> dict[str, list[str]]:
        """Until nothing of a broken cycle is at work: what lives may finish, what is dead is found by reconcile."""
        deadline, state = time.monotonic() + RUN_S, ""
        while self.pipe.waiting() and time.monotonic() < deadline:
            if not (dead := self._dead()):
                time.sleep(0.5)
                continue
            # A living cycle may wait for a dead training: with it alive, no healthy run may be taken for dead.
            others = {run["id"] for run in self.pipe.waiting()} - dead
            patience = {**IMPATIENT, "silent_s": BEAT_S + 5, "second_look_s": BEAT_S + 2, "pending_s": 30}
            state = self._reconcile(patience if others else IMPATIENT)
        state = state or self._reconcile(IMPATIENT)
        faults = [] if state == "COMPLETED" else [f"reconcile ended {state}"]
        faults += ["runs do not end"] if time.monotonic() > deadline else []
        return {"incomplete": faults} if faults else {}

    def _dead(self) -> set[str]:
        """Runs at work without a process, by two looks: one that begins has none for a moment."""
        looks = []
        for _ in range(2):
            looks.append({run["id"] for run in self.pipe.at_work()} - self.pipe.flows().keys())
            time.sleep(3.0 if looks[0] and len(looks) == 1 else 0.0)
        return looks[0] & looks[1]

    def _reconcile(self, patience: dict[str, Any]) -> str:
        return self.pipe.finished(self.pipe.run("reconcile/reconcile", patience=patience), RUN_S)


def plans(drill: Drill, kills: int, boundaries: bool, seed: int) -> list[Kill]:
    """A flow's death at every boundary, with every other victim somewhere among them, and random moments.

    In random order, so that a drill which is broken off has seen some of each.
    """
    kinds: list[tuple[str, str | None]] = [(VICTIMS[i % len(VICTIMS)], None) for i in range(kills)]
    if boundaries:
        others = VICTIMS[1:]
        for place, boundary in enumerate(drill.stages):
            kinds += [("flow", boundary), (others[place % len(others)], boundary)]
    random.Random(seed).shuffle(kinds)
    return [Kill(number, *kind) for number, kind in enumerate(kinds)]


def run(drill: Drill, args: argparse.Namespace) -> tuple[list[Round], int]:
    """All rounds of this part that are not in the home's log yet, with progress; and how many are planned."""
    file: Path = args.home / ROUNDS
    done = rounds(args.home)
    wanted = remembered(args, plans(drill, args.kills, args.boundaries, args.seed))
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
            drill.calm(3)
            done, planned = run(drill, args)
            result = report(drill.books, done, args.seed) | {"planned": planned}
        write_durably(home / REPORT, json.dumps(result).encode())
        if args.part == "1/1":
            merge({"drill": result} if planned else {}, args.out)
    # A calm cycle less the two seconds that the stand-in trains; beside another part it says nothing.
    if args.part == "1/1":
        merge({"orchestration_s": round(statistics.median(drill.took) - 2.0, 1)}, args.out)
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
