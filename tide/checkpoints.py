"""Which checkpoint of a run is the candidate: the one with the best walk on the selection split.

Pure but for the walk it is given. Knows nothing of stores, flows or how a draft is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tide.domain import EvalReport
from tide.errors import TrainingError
from tide.trainer.base import Checkpoint


def best(
    checkpoints: Sequence[Checkpoint],
    walk: Callable[[Path], EvalReport | None],
    say: Callable[[str], None],
) -> tuple[Checkpoint, float | None]:
    """The checkpoint with the longest acceptance on the selection split, which neither training nor the gate sees.

    The loss is no guide: it keeps falling after acceptance has peaked. Without selection requests the last one is
    taken, and its acceptance is None.

    Args:
        walk: walks a draft folder over the selection requests; None when there are none.
        say: takes a line about each checkpoint.

    Raises:
        TrainingError: the run left no checkpoint.
    """
    if not checkpoints:
        raise TrainingError("the run left no checkpoint; see its log in the training folder")
    scored = []
    for checkpoint in checkpoints:
        report = walk(checkpoint.draft)
        if report is None:
            say("no selection requests: the last checkpoint is taken")
            return checkpoints[-1], None
        say(f"step {checkpoint.step}: acceptance length {report.acceptance_length:.3f}")
        scored.append((report.acceptance_length, checkpoint))
    length, chosen = max(scored, key=lambda pair: pair[0])
    return chosen, length
