"""Reports of two regimes or two trees are never compared; a parent must reproduce what its record says."""

from __future__ import annotations

import pytest

from tests.support.reports import CANDIDATE, INCUMBENT, report, score
from tide.errors import EvaluationError
from tide.promotion.comparable import check_comparable, check_reproduced


@pytest.mark.parametrize("found", [1.60, 1.616, 1.584])
def test_a_parent_within_the_tolerance_is_trained_on(found: float) -> None:
    check_reproduced(1.60, found, 0.0101)


@pytest.mark.parametrize("found", [1.0, 1.57, 1.63])
def test_a_parent_that_accepts_something_else_is_refused_with_both_figures(found: float) -> None:
    with pytest.raises(EvaluationError, match=rf"{found:.3f} where its record says 1\.600"):
        check_reproduced(1.60, found, 0.01)


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("sampling", "temperature 0.70", "greedy"),
        ("sampling", "temperature 0.70", "temperature 0.80"),
        ("topk", 4, 1),
        ("draft_tokens", 16, 8),
    ],
)
def test_reports_of_different_regimes_or_trees_are_refused_by_the_part(
    field: str, ours: object, theirs: object
) -> None:
    scores = [score("a", 30, 12)]
    mine, other = report(CANDIDATE, scores, **{field: ours}), report(INCUMBENT, scores, **{field: theirs})
    with pytest.raises(EvaluationError, match=f"reports differ in {field}"):
        check_comparable(mine, other, "commit")
    check_comparable(mine, report(INCUMBENT, scores, **{field: ours}), "commit")
