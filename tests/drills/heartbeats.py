"""The heartbeat drill: minutes of a saturated CPU, and runs that wait for a person, must not look like death.

A healthy run sleeps, another is suspended, and twice as many busy processes as there are CPUs take the machine; then
neither may have been marked crashed by the automation, whose patience is the shortest that it can be given here: three
beats of Prefect's least, 30 s.

    python -m tests.drills.heartbeats [--minutes 10] [--busy N] [--out FILE]

Exit code 1 when a healthy run was crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from infra import automations, prefect
from tests.bench.operate_results import merge
from tests.support.operated import BEAT_S, Pipeline, wait_for
from tests.support.operating import pipeline

BUSY = "while True: pass"


def beats(pipe: Pipeline, run: str) -> list[float]:
    """When each heartbeat of a run was sent, seconds since the epoch, in order."""
    wanted = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{run}"]}}
    page = pipe.call("POST", "events/filter", {"filter": wanted, "limit": 50})
    return sorted(time_of(event["occurred"]) for event in page["events"])


def time_of(text: str) -> float:
    """Seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def drill(home: Path, minutes: float, load: int) -> dict[str, Any]:
    """Runs under load; what became of them."""
    with pipeline(home, pools=("cpu",)) as pipe:
        automations.apply(prefect.api_url(pipe.port), beat_s=BEAT_S)
        waits, sleeps = pipe.run("waits/waits"), pipe.run("sleeps/sleeps", seconds=60 * minutes + 30)
        assert wait_for(lambda: pipe.state(waits) == "PAUSED" and pipe.state(sleeps) == "RUNNING", 300)
        busy = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(load)]
        try:
            time.sleep(60 * minutes)
            average = os.getloadavg()[1]
            states = {"healthy": pipe.state(sleeps), "waiting": pipe.state(waits)}
        finally:
            for process in busy:
                process.kill()
                process.wait()
        end, sent = pipe.finished(sleeps, 300), beats(pipe, sleeps)
        gaps = [later - earlier for earlier, later in pairwise(sent)]
        return {
            "minutes": minutes,
            "busy_processes": load,
            "load_average_5min": round(average, 1),
            "states_under_load": states,
            "healthy_ended": end,
            "beats": len(sent),
            "longest_gap_s": round(max(gaps, default=0.0), 1),
            "crashed": sum(state == "CRASHED" for state in (*states.values(), end)),
        }


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1), help="busy processes")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    with tempfile.TemporaryDirectory() as folder:
        found = drill(Path(folder), args.minutes, args.busy)
    merge({"heartbeats": found}, args.out)
    print(json.dumps(found))
    sys.exit(int(found["crashed"] > 0 or found["healthy_ended"] != "COMPLETED"))


if __name__ == "__main__":
    main()
