"""How alpha is shared among the verdicts of a family, and what that means in a year."""

from __future__ import annotations

import pytest

from tests.support.signed import verdict_on
from tide.domain import GateGeneration, Verdict
from tide.promotion.families import (
    YEAR_S,
    attempt_alpha,
    attempt_of,
    false_promotions_a_year,
    family_of,
    family_rate,
    uses_of,
)

A, B, C = "a" * 64, "b" * 64, "c" * 64


def given(candidate: str, incumbent: str, generation: str) -> Verdict:
    gate = GateGeneration(id=generation, first=0.0, until=1.0, requests=9)
    family = family_of(generation, incumbent)
    return verdict_on(candidate, incumbent).model_copy(update={"gate": gate, "family": family})


def test_alpha_shrinks_with_attempts_and_sums_to_the_family() -> None:
    assert attempt_alpha(0.04, 1) == pytest.approx(0.04 * 0.6079, rel=1e-3)
    assert attempt_alpha(0.04, 3) == pytest.approx(attempt_alpha(0.04, 1) / 9)
    assert family_rate(0.04, 5000) == pytest.approx(0.04, rel=1e-3)
    assert family_rate(0.04, 10) < 0.04


def test_attempts_count_within_one_family_whatever_the_candidate() -> None:
    verdicts = [given(A, B, "g1"), given(C, B, "g1"), given(A, C, "g1"), given(A, B, "g2"), verdict_on(A, B)]
    assert attempt_of(verdicts, family_of("g1", B)) == 3
    assert attempt_of(verdicts, family_of("g2", B)) == 2
    assert attempt_of(verdicts, family_of("g3", B)) == 1


def test_a_generation_is_used_by_verdicts_against_any_incumbent() -> None:
    verdicts = [given(A, B, "g1"), given(C, B, "g1"), given(A, C, "g1"), given(A, B, "g2"), verdict_on(A, B)]
    assert uses_of(verdicts, "g1") == 3


def test_a_new_generation_or_a_new_incumbent_is_a_new_family() -> None:
    assert len({family_of("g1", A), family_of("g2", A), family_of("g1", B)}) == 3


@pytest.mark.parametrize(
    ("generation_s", "expected"),
    [
        (86_400.0, 365 * family_rate(0.04, 10)),  # 24 cycles a generation, ten of them count
        (7200.0, 365 * 12 * family_rate(0.04, 2)),
        (3600.0, 365 * 24 * family_rate(0.04, 1)),
        (60.0, 365 * 24 * family_rate(0.04, 1)),  # no more families than cycles
    ],
)
def test_the_false_promotions_of_a_year_follow_traffic_and_schedule(generation_s: float, expected: float) -> None:
    found = false_promotions_a_year(0.04, generation_s=generation_s, cycle_s=3600.0, max_verdicts=10)
    assert found == pytest.approx(expected)
    assert found <= 0.04 * YEAR_S / 3600
