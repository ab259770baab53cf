"""The store's fault drill: harvesters and the lakeFS server are killed at random points; nothing is lost or doubled.

Two replicas are harvested side by side, again and again, on a real lakeFS server with real shard files. In each round
one harvester, or the server, gets SIGKILL at a random moment of the harvest; the server is started again, and the next
run must complete. At the end every byte and every commit is read back.

    python -m tests.drills.store [--kills 50] [--server-kills 10] [--seed 1] [--out FILE]

Exit code 1 when anything was lost or doubled, or a run after a kill did not complete.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import ports
from infra.lakefs.server import LakefsServer
from tests.drills import harvesters
from tests.drills.deliveries import Spools
from tests.drills.harvesters import Harvest
from tests.support.harvested import ReadBack, read_back
from tide.store.lakefs import LakefsStore

RESULT = Path(__file__).parents[1] / "bench" / "results" / "store_drill.json"
REPOSITORY, REPLICAS = "drill-states", ("r0", "r1")
RUN_S = 1800.0
"""A harvest here takes a second; on a machine that has no time for it, minutes. After this it hangs."""


@dataclass
class Drill:
    """The server, the spools, and what has happened so far."""

    server: LakefsServer
    spools: Spools
    rng: random.Random
    logs: Path
    took: list[float] = field(default_factory=list)
    """Seconds of the runs that nobody disturbed, the start and end of their processes left out."""
    landed: Counter[str] = field(default_factory=Counter)
    """What the killed harvesters had reached."""
    incomplete: list[str] = field(default_factory=list)

    @property
    def store(self) -> LakefsStore:
        """A client of the server."""
        keys = self.server.credentials
        return LakefsStore(self.server.endpoint, keys.access_key, keys.secret_key)

    def calm(self) -> None:
        """Rounds without a kill: how long does a harvest take here? The first one imports, and does not count."""
        for _ in range(3):
            self.spools.fill()
            self._complete("a calm round")
        self.took.pop(0)

    def kill_harvester(self) -> bool:
        """One round; False when the harvest was over before the kill, so that it does not count."""
        self.spools.fill()
        running = self._begin()
        victim = self.rng.choice(REPLICAS)
        self._wait_somewhere(running[victim])
        killed = _kill(running[victim])
        self._join(running)
        if killed:
            self.landed[self._reached(victim)] += 1
        self._complete("the run after a harvester's death")
        return killed

    def kill_server(self) -> bool:
        """One round; False when no harvester was at work at the kill."""
        self.spools.fill()
        running = self._begin()
        watched = running[self.rng.choice(REPLICAS)]
        self._wait_somewhere(watched)
        process = self.server.process
        assert process is not None
        assert process.child is not None
        os.kill(process.record.pid, signal.SIGKILL)
        at_work = not watched.news.poll()
        process.child.wait(RUN_S)
        self.server.start()
        self._join(running, allowed=(0, harvesters.REFUSED))
        self._complete("the run after the server's death")
        return at_work

    def _begin(self) -> dict[str, Harvest]:
        return {replica: harvesters.start(self._job(replica)) for replica in REPLICAS}

    def _job(self, replica: str) -> harvesters.Job:
        return harvesters.Job(
            self.server.endpoint,
            self.server.credentials,
            REPOSITORY,
            replica,
            self.spools.folder(replica),
            self.spools.now,
            self.logs / f"{replica}.log",
        )

    def _wait_somewhere(self, harvest: Harvest) -> None:
        """Until a random moment of a harvest that has begun."""
        harvest.hears(RUN_S)
        time.sleep(self.rng.uniform(0, statistics.median(self.took[-5:])))

    def _join(self, running: dict[str, Harvest], allowed: tuple[int, ...] = (0,)) -> None:
        """Wait for all; whatever ended otherwise, and was not killed, did not complete."""
        for replica, harvest in running.items():
            process = harvest.process
            process.join(RUN_S)
            if process.exitcode not in (*allowed, -signal.SIGKILL):
                self.incomplete.append(f"{replica} beside a kill: exit code {process.exitcode}")

    def _complete(self, which: str) -> None:
        running = self._begin()
        for harvest in running.values():
            harvest.hears(RUN_S)
        began = time.monotonic()
        for harvest in running.values():
            harvest.hears(RUN_S)
        self.took.append(time.monotonic() - began)
        for replica, harvest in running.items():
            harvest.process.join(RUN_S)
            if harvest.process.exitcode != 0:
                self.incomplete.append(f"{which}: {replica}: exit code {harvest.process.exitcode}, see {self.logs}")
        left = [*self.spools.left(), *(b for b in self.store.branches(REPOSITORY) if b != "main")]
        if left:
            self.incomplete.append(f"{which}: left behind: {', '.join(left)}")

    def _reached(self, replica: str) -> str:
        """Where in the order of a window a harvester died, as far as the store tells."""
        store = self.store
        for branch in store.branches(REPOSITORY):
            if branch.endswith(f"-{replica}"):
                if any(store.uncommitted(REPOSITORY, branch)):
                    return "objects staged"
                head = store.head(REPOSITORY, branch).id
                on_main = any(commit.id == head for commit in store.log(REPOSITORY, "main"))
                return "branch empty or merged" if on_main else "committed, not merged"
        return "no branch: before, between or after windows"


def _kill(harvest: Harvest) -> bool:
    """SIGKILL; False when it had done its work."""
    process = harvest.process
    process.kill()
    process.join(RUN_S)
    return process.exitcode == -signal.SIGKILL and not harvest.hears(0)


def run(drill: Drill, kills: int, server_kills: int) -> None:
    """All rounds, in a random order, with progress."""
    drill.calm()
    left = ["harvester"] * kills + ["server"] * server_kills
    drill.rng.shuffle(left)
    began, total = time.monotonic(), len(left)
    while left:
        if drill.kill_harvester() if left[-1] == "harvester" else drill.kill_server():
            left.pop()
        done, spent = total - len(left), time.monotonic() - began
        togo = f", {spent / done * len(left):.0f} s to go" if done else ""
        print(f"{done}/{total} kills after {spent:.0f} s{togo}; incomplete runs: {len(drill.incomplete)}", flush=True)


def report(drill: Drill, found: ReadBack, args: argparse.Namespace, wall_s: float) -> dict[str, Any]:
    """What is written down."""
    return {
        "drill": {
            "kills": args.kills,
            "server_kills": args.server_kills,
            "lost": len(found.lost),
            "doubled": len(found.doubled),
            "incomplete": len(drill.incomplete),
            "wall_s": round(wall_s, 1),
        },
        "shards": found.shards,
        "requests": found.requests,
        "windows": len(drill.spools.good.windows),
        "commits": found.commits,
        "quarantined": len(drill.spools.broken),
        "harvesters_died_at": dict(sorted(drill.landed.items())),
        "harvest_s": round(statistics.median(drill.took), 3),
        "seed": args.seed,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
    }


def main() -> None:
    """Run, read back, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--server-kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    # Ending by SIGTERM must end the server as well.
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home, rng = Path(folder), random.Random(args.seed)
        with LakefsServer(home, port=ports.free_port(), ready_s=RUN_S, die_with_parent=True) as server:
            drill = Drill(server, Spools(home / "spools", REPLICAS, rng), rng, home)
            run(drill, args.kills, args.server_kills)
            found = read_back(drill.store, REPOSITORY, drill.spools.good)
            for line in [*drill.incomplete, *found.lost, *found.doubled]:
                print(line, file=sys.stderr)
            result = report(drill, found, args, time.monotonic() - began)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["drill"]))
    sys.exit(int(bool(found.lost or found.doubled or drill.incomplete)))


if __name__ == "__main__":
    main()
