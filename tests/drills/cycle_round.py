"""One round of the operator's drill: begin a cycle on new traffic, kill, settle, run the next, look at the books.

Knows nothing of which rounds there are, or of what they come to.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from tests.drills.cycle_books import Books
from tests.drills.cycle_report import Kill, Round
from tests.support.drilled_names import HOLD
from tests.support.operated import BEAT_S, FINAL, IMPATIENT, Pipeline, kill, wait_for

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
        elif plan.victim == "trainer":
            # A training is a moment of a cycle: one that is sought at any moment is hardly ever met.
            wait_for(lambda: bool(pipe.trainers()) or self._over(first), RUN_S)
            time.sleep(self.rng.uniform(0, 1.0))
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
        return self.pipe.state(run) in FINAL and not self.pipe.waiting()

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
