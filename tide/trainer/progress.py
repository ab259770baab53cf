"""What a training run says while it runs, and when that means trouble.

Owns the reading of SpecForge's step lines, the time to go, and the two verdicts that stop a run: diverged and stalled.
Pure: lines and times come in as arguments. Knows nothing of processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from tide.domain import TrainingProgress
from tide.errors import TrainingDiverged, TrainingStalled
from tide.trainer.base import ProgressCallback

Clock = Callable[[], float]

_STEP = re.compile(r"(?:^|\s)step (\d+): \{(.*)\}\s*$")
_LOSS = re.compile(r"'loss': ([^,}\s]+)")


def parse_step(line: str) -> tuple[int, float | None] | None:
    """(step, loss) of a SpecForge step line; loss None when the line reports something else; None for other lines."""
    found = _STEP.search(line)
    if found is None:
        return None
    loss = _LOSS.search(found[2])
    try:
        return int(found[1]), None if loss is None else float(loss[1])
    except ValueError:
        return int(found[1]), None


class Watch:
    """Follows one run by its lines and the clock.

    Args:
        total_steps: steps the run will take.
        now: time of the start, seconds.
        first_step_s: longest time to the first step; start-up and loading are in it.
        step_s: longest time from one step to the next.
        bad_steps: so many steps in a row with loss 0 or not finite stop the run.
    """

    def __init__(self, total_steps: int, now: float, *, first_step_s: float, step_s: float, bad_steps: int) -> None:
        self.total_steps, self.step, self.loss = total_steps, 0, math.nan
        self._first_step_s, self._step_s, self._bad_steps = first_step_s, step_s, bad_steps
        self._moved, self._bad = now, 0
        self._first: tuple[int, float] | None = None

    def read(self, line: str, now: float) -> TrainingProgress | None:
        """Take one line; returns progress when it reports a step. Each rank may report the same one.

        Raises:
            TrainingDiverged: the loss was 0 or not finite for too many steps in a row.
        """
        found = parse_step(line)
        if found is None or found[1] is None or found[0] <= self.step:
            return None
        self.step, self.loss = found[0], found[1]
        self._moved = now
        self._first = self._first or (self.step, now)
        self._judge()
        return TrainingProgress(
            step=self.step,
            total_steps=self.total_steps,
            loss=self.loss if math.isfinite(self.loss) else None,
            eta_s=self._eta(now),
        )

    def check(self, now: float) -> None:
        """Raises TrainingStalled when no step was reported for too long."""
        limit = self._first_step_s if self._first is None else self._step_s
        if now - self._moved > limit:
            what = "no first step" if self._first is None else f"no step after step {self.step}"
            raise TrainingStalled(f"training: {what} for {now - self._moved:.0f} s (limit {limit:.0f} s); it was ended")

    def _judge(self) -> None:
        good = math.isfinite(self.loss) and self.loss != 0.0
        self._bad = 0 if good else self._bad + 1
        if self._bad >= self._bad_steps:
            raise TrainingDiverged(
                f"training: loss {self.loss} for {self._bad} steps in a row, at step {self.step}: it learns nothing. "
                "0 means that no row is supervised (vocabulary map, masks), nan that the states or the rate are bad"
            )

    def _eta(self, now: float) -> float | None:
        if self._first is None or self.step <= self._first[0]:
            return None
        return (now - self._first[1]) / (self.step - self._first[0]) * max(0, self.total_steps - self.step)


def follow(lines: Iterable[str | None], watch: Watch, clock: Clock, on_progress: ProgressCallback) -> None:
    """Read a run to its end. ``None`` among the lines means that time has passed without a line.

    Raises:
        TrainingDiverged, TrainingStalled, and whatever ``on_progress`` raises.
    """
    for line in lines:
        now = clock()
        progress = None if line is None else watch.read(line, now)
        if progress is not None:
            on_progress(progress)
        watch.check(now)
