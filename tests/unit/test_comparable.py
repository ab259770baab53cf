"""A parent must reproduce its recorded acceptance before it is trained on."""

from __future__ import annotations

import pytest

from tide.comparable import check_reproduced
from tide.errors import EvaluationError


@pytest.mark.parametrize("found", [1.60, 1.616, 1.584])
def test_a_parent_within_the_tolerance_is_trained_on(found: float) -> None:
    check_reproduced(1.60, found, 0.0101)


@pytest.mark.parametrize("found", [1.0, 1.57, 1.63])
def test_a_parent_that_accepts_something_else_is_refused_with_both_figures(found: float) -> None:
    with pytest.raises(EvaluationError, match=rf"{found:.3f} where its record says 1\.600"):
        check_reproduced(1.60, found, 0.01)
