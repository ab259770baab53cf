"""Which checkpoint of a run is the candidate: the one with the best walk on the selection split.

Pure but for the walk it is given. Knows nothing of stores, flows or how a draft is walked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tide.domain import CheckpointChoice, CheckpointScore, EvalReport
from tide.errors import TrainingError
from tide.trainer.base import Checkpoint


def best(
    checkpoints: Sequence[Checkpoint],
    walk: Callable[[Path], EvalReport | None],
    say: Callable[[str], None],
    *,
    final_loss: float | None = None,
    states_commit: str = "",
) -> tuple[Checkpoint, CheckpointChoice]:
    """The checkpoint with the longest acceptance on the selection split, which neither training nor the gate sees.

    The loss is no guide: it keeps falling after acceptance has peaked. Of equal ones the earliest is taken. Without
    selection requests it is the last one, and no acceptance is known.

    Args:
        walk: walks a draft folder over the selection requests; None when there are none.
        say: takes a line about each checkpoint, and the reason of the choice.
        final_loss, states_commit: recorded with the choice.

    Raises:
        TrainingError: the run left no checkpoint.
    """
    if not checkpoints:
        raise TrainingError("the run left no checkpoint; see its log in the training folder")
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    reports = _walk_all(ordered, walk, say)
    lengths: list[float | None] = [report.acceptance_length for report in reports] or [None for _ in ordered]
    place, reason = _choose([c.step for c in ordered], lengths)
    say(reason)
    choice = CheckpointChoice(
        chosen=ordered[place].digest,
        reason=reason,
        checkpoints=tuple(
            CheckpointScore(step=c.step, draft=c.digest, acceptance_length=length)
            for c, length in zip(ordered, lengths, strict=True)
        ),
        requests=len(reports[0].scores) if reports else 0,
        # A run may end on a step without a loss; JSON has no NaN.
        final_loss=final_loss if final_loss is not None and math.isfinite(final_loss) else None,
        states_commit=states_commit,
    )
    return ordered[place], choice


def _walk_all(
    checkpoints: Sequence[Checkpoint], walk: Callable[[Path], EvalReport | None], say: Callable[[str], None]
) -> list[EvalReport]:
    """A report of each, or none at all when there are no selection requests."""
    reports = []
    for checkpoint in checkpoints:
        report = walk(checkpoint.draft)
        if report is None:
            return []
        say(f"step {checkpoint.step}: acceptance length {report.acceptance_length:.3f}")
        reports.append(report)
    return reports


def _choose(steps: Sequence[int], lengths: Sequence[float | None]) -> tuple[int, str]:
    """Place of the chosen one, and the reason."""
    known = [length for length in lengths if length is not None]
    last = len(steps) - 1
    if not known:
        return last, f"step {steps[-1]}: no selection requests to walk, so the last checkpoint is taken"
    place = lengths.index(max(known))
    reason = f"step {steps[place]}: longest acceptance on the selection split, {known[place]:.3f}"
    if known.count(known[place]) > 1:
        reason += ", the earliest of equal ones"
    if place != last:
        reason += f"; the last, step {steps[-1]}, has {known[-1]:.3f}"
    return place, reason
