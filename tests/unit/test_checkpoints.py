"""The checkpoint that becomes the candidate is the one with the best walk, and the record says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.reports import report, score
from tide.domain import CheckpointChoice, EvalReport
from tide.errors import TrainingError
from tide.trainer import checkpoints
from tide.trainer.base import Checkpoint

LOSSES = [2.69, 2.31, 2.02, 1.74, 1.50]
"""They fall all the way: DeepSpec#84."""
LENGTHS = [3.28, 3.34, 3.34, 3.24, 3.18]


def made(lengths: Sequence[float]) -> list[Checkpoint]:
    return [
        Checkpoint(step=100 * (i + 1), draft=Path(f"step-{i + 1}"), digest=f"{i + 1:064x}") for i in range(len(lengths))
    ]


def walked(lengths: Sequence[float]) -> dict[Path, EvalReport]:
    """Two requests whose pooled acceptance length is the wanted one."""
    return {
        c.draft: report(c.digest, [score("a", round(100 * length), 100), score("b", round(100 * length), 100)])
        for c, length in zip(made(lengths), lengths, strict=True)
    }


def choose(lengths: Sequence[float]) -> tuple[Checkpoint, CheckpointChoice]:
    reports = walked(lengths)
    return checkpoints.best(
        made(lengths), reports.__getitem__, lambda _: None, final_loss=LOSSES[-1], states_commit="5" * 64
    )


def test_the_best_walk_is_chosen_while_the_loss_falls_all_the_way() -> None:
    chosen, choice = choose(LENGTHS)
    assert chosen.step == 200, "of the two with 3.34 the earlier"
    assert choice.chosen == chosen.digest
    assert choice.acceptance_length == pytest.approx(3.34)
    assert choice.reason == (
        "step 200: longest acceptance on the selection split, 3.340, the earliest of equal ones; "
        "the last, step 500, has 3.180"
    )


def test_the_record_holds_every_checkpoint_with_its_acceptance() -> None:
    _, choice = choose(LENGTHS)
    assert [c.step for c in choice.checkpoints] == [100, 200, 300, 400, 500]
    assert [c.acceptance_length for c in choice.checkpoints] == pytest.approx(LENGTHS)
    assert (choice.requests, choice.final_loss, choice.states_commit) == (2, 1.50, "5" * 64)
    assert CheckpointChoice.model_validate_json(choice.to_json()) == choice


@pytest.mark.parametrize(("lengths", "step"), [([2.0, 2.1], 200), ([2.1, 2.0], 100), ([2.1], 100)])
def test_the_order_of_the_run_decides_nothing(lengths: list[float], step: int) -> None:
    chosen, choice = choose(lengths)
    assert chosen.step == step
    assert "equal" not in choice.reason


def test_checkpoints_given_in_another_order_make_the_same_choice() -> None:
    reports = walked(LENGTHS)
    chosen, choice = checkpoints.best(made(LENGTHS)[::-1], reports.__getitem__, lambda _: None)
    assert chosen.step == 200
    assert [c.step for c in choice.checkpoints] == [100, 200, 300, 400, 500]


def test_without_selection_requests_the_last_is_taken_and_the_record_says_so() -> None:
    chosen, choice = checkpoints.best(made(LENGTHS), lambda _: None, lambda _: None)
    assert (chosen.step, choice.acceptance_length, choice.requests) == (500, None, 0)
    assert "no selection requests" in choice.reason


def test_a_run_that_ended_without_a_loss_is_recorded_all_the_same() -> None:
    _, choice = checkpoints.best(made([2.0]), walked([2.0]).__getitem__, lambda _: None, final_loss=math.nan)
    assert choice.final_loss is None
    assert CheckpointChoice.model_validate_json(choice.to_json()) == choice


def test_a_run_without_a_checkpoint_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no checkpoint"):
        checkpoints.best([], lambda _: None, lambda _: None)


def test_each_checkpoint_and_the_reason_are_told_while_they_are_walked() -> None:
    said: list[str] = []
    checkpoints.best(made(LENGTHS), walked(LENGTHS).__getitem__, said.append)
    assert said[1] == "step 200: acceptance length 3.340"
    assert said[-1].startswith("step 200: longest acceptance")
