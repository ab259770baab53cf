"""A better acceptance length must also be faster: predicted throughput in the verdict (drill D2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.reports import TARGET, paired_reports
from tide.acceptance import baseline_without_draft
from tide.config import PromotionPolicy
from tide.domain import EngineProfile, EvalReport, ProfilePoint, Verdict
from tide.errors import ContractMismatch, EvaluationError
from tide.promotion.rule import decide
from tide.promotion.verdict_text import to_markdown

POLICY = PromotionPolicy(resamples=400)
# Plain steps cost 10 ms alone and 20 ms at 32 running requests, where verifying is twice as dear: 4 ms a draft step.
PROFILE = EngineProfile(
    points=(
        ProfilePoint(concurrency=1, plain_step_s=0.010, verify_step_s=0.011, draft_step_s=0.0005),
        ProfilePoint(concurrency=32, plain_step_s=0.020, verify_step_s=0.040, draft_step_s=0.0040),
    )
)


def verdict(reports: tuple[EvalReport, EvalReport], load: Mapping[int, float] | None, **changes: Any) -> Verdict:
    options: dict[str, Any] = {"profile": PROFILE, "attempt": 1, "states_commit": "commit", "policy_digest": "p"}
    return decide(*reports, POLICY, concurrency=load, **(options | changes))


def test_a_gain_that_is_faster_is_promoted_and_says_by_how_much() -> None:
    found = verdict(paired_reports({"chat": 0.2}, 150), {1: 1.0})
    assert found.outcome == "promote"
    assert found.throughput is not None
    assert found.throughput.candidate == pytest.approx(found.overall.candidate / 1.25)
    assert found.throughput.incumbent == pytest.approx(found.overall.incumbent / 1.25)
    assert found.throughput.break_even == pytest.approx(1.25)
    assert any(r.startswith("throughput: predicted") for r in found.reasons)
    assert Verdict.model_validate_json(found.to_json()) == found


def test_a_better_draft_below_break_even_is_not_promoted_and_speculation_itself_is_named() -> None:
    found = verdict(paired_reports({"chat": 0.2}, 150), {32: 1.0})
    assert found.overall.difference.low > POLICY.min_gain
    assert found.outcome == "reject"
    assert found.reasons[0].startswith("throughput: speculation itself does not pay at this load")
    assert "mean concurrency of 32.0" in found.reasons[0]
    assert "breaks even at an acceptance length of 2.600" in found.reasons[0]
    assert "speculation does not pay" in to_markdown(found)


@pytest.mark.parametrize(("share", "outcome"), [(0.15, "promote"), (0.60, "reject")])
def test_the_services_own_load_decides(share: float, outcome: str) -> None:
    assert verdict(paired_reports({"chat": 0.2}, 150), {1: 1 - share, 32: 32 * share}).outcome == outcome


@pytest.mark.parametrize(("scale", "outcome"), [(1.0001, "promote"), (0.9999, "reject")])
def test_break_even_is_the_boundary(scale: float, outcome: str) -> None:
    reports = paired_reports({"chat": 0.2}, 150)
    length = reports[0].acceptance_length
    point = ProfilePoint(concurrency=1, plain_step_s=0.01 * scale, verify_step_s=0.01 * length, draft_step_s=0.0)
    assert verdict(reports, {1: 1.0}, profile=EngineProfile(points=(point,))).outcome == outcome


def test_a_first_draft_is_held_against_plain_decoding_itself() -> None:
    ours, _ = paired_reports({"chat": 0.0}, 60, length=1.5)
    found = verdict((ours, baseline_without_draft(ours)), {1: 1.0})
    assert found.outcome == "promote"
    assert found.throughput is not None
    assert found.throughput.incumbent == 1.0
    assert verdict((ours, baseline_without_draft(ours)), {32: 1.0}).outcome == "reject"


def test_a_proven_loss_is_named_as_a_fall_of_throughput_too() -> None:
    found = verdict(paired_reports({"chat": -0.3}, 150), {1: 1.0})
    assert found.outcome == "reject"
    assert any(r.startswith("throughput: it falls") for r in found.reasons)


def test_a_loss_that_is_not_proven_is_no_fall() -> None:
    found = verdict(paired_reports({"chat": -0.03}, 30, seed=2), {1: 1.0})
    assert found.outcome == "inconclusive"
    assert not any("it falls" in r for r in found.reasons)


@pytest.mark.parametrize(
    ("profile", "load", "said"),
    [(None, {1: 1.0}, "not profiled"), (PROFILE, None, "not checked"), (PROFILE, {}, "not checked")],
)
def test_without_profile_or_load_the_verdict_says_that_throughput_was_not_checked(
    profile: EngineProfile | None, load: Mapping[int, float] | None, said: str
) -> None:
    found = verdict(paired_reports({"chat": 0.3}, 150), load, profile=profile)
    assert (found.outcome, found.throughput) == ("promote", None)
    assert any(r.startswith("throughput: ") and said in r for r in found.reasons)


def test_a_profile_of_another_target_is_refused_by_part() -> None:
    other = PROFILE.model_copy(update={"target": TARGET.model_copy(update={"weights": "9" * 64})})
    with pytest.raises(ContractMismatch, match="weights"):
        verdict(paired_reports({"chat": 0.2}, 60), {1: 1.0}, profile=other)


def test_a_profile_of_trees_says_nothing_of_chains() -> None:
    with pytest.raises(EvaluationError, match="topk 4"):
        verdict(paired_reports({"chat": 0.2}, 60), {1: 1.0}, profile=PROFILE.model_copy(update={"topk": 4}))
