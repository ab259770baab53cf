"""How fast the Prefect server's database grows: bytes of a run of each deployment and of a heartbeat, times a week's.

Real runs of every deployment on a real server, and heartbeats at an accelerated rate; what SQLite has grown by, free
pages left out, is divided by their number. A week has what prefect.yaml schedules, with ``--trained`` trainings, each
an hour, and a heartbeat a minute of all that runs. What the server deletes meanwhile (events after three days, runs
after two weeks) is not taken off, but for heartbeats, which are kept a day.

    python -m tests.bench.prefect_growth [--runs 8] [--trained 28] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import sqlite3
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from infra import prefect, prefect_access
from tests.bench.operate_results import merge
from tests.support.operated import Pipeline, wait_for
from tests.support.operating import pipeline
from tide.recovery.rules import BEAT_S

WEEK_S = 7 * 86400
SCHEDULED = {"harvest": WEEK_S // 300, "adapt": WEEK_S // 900, "reconcile": WEEK_S // 900, "retain": 7}
"""Runs a week, as prefect.yaml schedules them."""
TRAINING_S = 3600
HEARTBEATS = 4000
FLUSH_S = 8.0
"""Until the server has written what it has received: it flushes every five seconds."""


@dataclass
class Growth:
    """The database of one pipeline."""

    pipe: Pipeline

    def bytes(self) -> int:
        """What is in use: pages, free ones left out."""
        time.sleep(FLUSH_S)
        with sqlite3.connect(
            f"file:{self.pipe.home / 'prefect' / 'prefect.db'}?mode=ro", uri=True, timeout=60
        ) as found:
            pages, free, size = (
                found.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    def of(self, work: Callable[[], int]) -> float:
        """Bytes that one of so many things takes."""
        before = self.bytes()
        number = work()
        return (self.bytes() - before) / number

    def runs(self, deployment: str, number: int, **parameters: Any) -> float:
        """Bytes of a run of a deployment."""

        def work() -> int:
            for _ in range(number):
                state = self.pipe.finished(self.pipe.run(f"{deployment}/{deployment}", **parameters))
                assert state == "COMPLETED", f"{deployment} ended {state}"
                wait_for(lambda: not self.pipe.waiting(), 300)
            return number

        return self.of(work)

    def cycles(self, number: int) -> float:
        """Bytes of a cycle that trains and promotes, with all that it starts."""

        def work() -> int:
            for _ in range(number):
                self.pipe.fill()
                assert self.pipe.finished(self.pipe.run("adapt/adapt", force=True)) == "COMPLETED"
                wait_for(lambda: not self.pipe.waiting(), 300)
            return number

        return self.of(work)

    def heartbeats(self) -> float:
        """Bytes of a heartbeat."""
        tags = [
            {"prefect.resource.id": f"prefect.tag.{name}", "prefect.resource.role": "tag"} for name in ("tide", "cycle")
        ]
        related = [
            {
                "prefect.resource.id": f"prefect.{role}.{uuid.uuid4()}",
                "prefect.resource.role": role,
                "prefect.resource.name": role,
            }
            for role in ("flow", "deployment")
        ]

        def work() -> int:
            for begin in range(0, HEARTBEATS, 100):
                at = [datetime.now(UTC) - timedelta(seconds=HEARTBEATS - begin - i) for i in range(100)]
                events = [
                    {
                        "id": str(uuid.uuid4()),
                        "occurred": moment.isoformat(),
                        "event": "prefect.flow-run.heartbeat",
                        "resource": {
                            "prefect.resource.id": f"prefect.flow-run.{uuid.uuid4()}",
                            "prefect.resource.name": "growing-run",
                        },
                        "related": [*related, *tags],
                        "payload": {},
                    }
                    for moment in at
                ]
                self._send(events)
            return HEARTBEATS

        return self.of(work)

    def _send(self, events: list[dict[str, Any]]) -> None:
        prefect_access.server_at(prefect.api_url(self.pipe.port)).call("POST", "events", events)


def measure(home: Path, runs: int, trained: int) -> dict[str, Any]:
    """Bytes of each kind, and a week of them."""
    with pipeline(home, train_s=0.5) as pipe:
        growth = Growth(pipe)
        pipe.fill()
        assert pipe.finished(pipe.run("adapt/adapt")) == "COMPLETED"
        wait_for(lambda: not pipe.waiting(), 300)
        each = {
            "harvest": growth.runs("harvest", runs),
            "adapt": growth.runs("adapt", runs),
            "reconcile": growth.runs("reconcile", runs),
            "retain": growth.runs("retain", max(2, runs // 4)),
            "cycle_with_training": growth.cycles(max(2, runs // 4)),
            "heartbeat": growth.heartbeats(),
        }
    # A training and the cycle that waits for it beat both; of what is deleted after a day a seventh is left.
    beats = 2 * trained * TRAINING_S / BEAT_S / 7
    week = sum(each[name] * number for name, number in SCHEDULED.items())
    week += trained * each["cycle_with_training"] + beats * each["heartbeat"]
    return {
        "bytes_each": {name: round(value) for name, value in each.items()},
        "runs_per_week": {**SCHEDULED, "cycle_with_training": trained},
        "mb_per_week": round(week / 1e6, 1),
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--trained", type=int, default=28)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.runs, args.trained)
    merge({"prefect_db_mb_per_week": found["mb_per_week"], "prefect_db": found}, args.out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
