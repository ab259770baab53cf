"""The operator's drill in short: the flow, the trainer and the store are killed, and the next cycle finishes.

In full (`make drill`) at every step boundary and at 50 random moments: tests/bench/results/operate.json.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.drills.cycle import Drill, Kill
from tests.support.operated import pipeline

ROUNDS = (
    Kill(0, "flow", "after roll out"),
    Kill(1, "store", "before publish candidate"),
)


def test_after_a_kill_the_next_cycle_finishes_and_nothing_is_half_done_lost_doubled_or_leaked(tmp_path: Path) -> None:
    with pipeline(tmp_path, train_s=1.0) as pipe:
        drill = Drill(pipe, random.Random(1))
        drill.calm(1)
        rounds = [drill.round(plan) for plan in ROUNDS]
        assert all(made.landed for made in rounds)
        assert [made.faults for made in rounds] == [{}, {}]
        found = drill.books.read_back()
        assert (found.lost, found.doubled, drill.books.double_trainings()) == ([], [], [])
        assert found.shards == 2 * pipe.windows
