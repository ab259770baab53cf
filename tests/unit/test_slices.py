"""Slices by name and by context length, and margins of single slices (drill D3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.reports import paired_reports, report
from tide.config import Policy, PromotionPolicy
from tide.domain import EvalReport, Verdict
from tide.errors import ConfigError
from tide.promotion.rule import decide
from tide.promotion.slices import context_names, context_slices

POLICY = PromotionPolicy(resamples=400)


def verdict(reports: tuple[EvalReport, EvalReport], **changes: Any) -> Verdict:
    policy = POLICY.model_copy(update=changes)
    return decide(*reports, policy, attempt=1, states_commit="commit", policy_digest="p")


def long_prompts(gains: dict[int, float], count: int = 120) -> tuple[EvalReport, EvalReport]:
    """One slice, ``chat``, with requests of each prompt length and their gain."""
    ours, theirs = [], []
    for index, (tokens, gain) in enumerate(gains.items()):
        pair = paired_reports({"chat": gain}, count, seed=index)
        for scores, made in zip((ours, theirs), pair, strict=True):
            names = {"request": f"{tokens}-", "conversation": f"{tokens}-"}
            scores += [
                s.model_copy(update={k: v + getattr(s, k) for k, v in names.items()} | {"prompt_tokens": tokens})
                for s in made.scores
            ]
    return report("c" * 64, ours), report("e" * 64, theirs)


def test_better_on_short_prompts_does_not_buy_a_loss_on_long_ones() -> None:
    found = verdict(long_prompts({500: 0.9, 4000: -0.25}))
    assert found.overall.difference.low > POLICY.min_gain
    assert found.outcome == "reject"
    assert found.reasons[0].startswith("slice_margin: slice context 2k-8k")
    assert [s.slice for s in found.slices] == ["chat", "context 0-1k", "context 2k-8k"]


def test_a_gain_at_every_length_is_promoted() -> None:
    assert verdict(long_prompts({500: 0.3, 4000: 0.3})).outcome == "promote"


def test_without_bounds_contexts_are_not_told_apart() -> None:
    found = verdict(long_prompts({500: 0.9, 4000: -0.25}), context_bounds=())
    assert ([s.slice for s in found.slices], found.outcome) == (["chat"], "promote")


def test_other_bounds_cut_elsewhere() -> None:
    found = verdict(long_prompts({500: 0.9, 4000: -0.25}), context_bounds=(5000,))
    assert ([s.slice for s in found.slices], found.outcome) == (["chat"], "promote")


def test_one_context_for_all_and_unknown_contexts_add_no_slice() -> None:
    assert [s.slice for s in verdict(long_prompts({500: 0.3})).slices] == ["chat"]
    assert [s.slice for s in verdict(paired_reports({"chat": 0.3}, 60)).slices] == ["chat"]


@pytest.mark.parametrize(("count", "slices"), [(19, ["context 0-1k", "context other"]), (20, ["context 0-1k"])])
def test_rare_contexts_are_pooled_and_named_when_too_few(count: int, slices: list[str]) -> None:
    short, rare = long_prompts({500: 0.4}, 100), long_prompts({9000: -0.5}, count)
    found = verdict(tuple(report(a.draft, a.scores + b.scores) for a, b in zip(short, rare, strict=True)))  # type: ignore[arg-type]
    names = [s.slice for s in found.slices][1:]
    assert names[: len(slices)] == slices
    assert found.outcome == ("promote" if count == 19 else "reject")
    assert any("slice context other is too small" in r for r in found.reasons) == (count == 19)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (0, ""),
        (1, "context 0-1k"),
        (1023, "context 0-1k"),
        (1024, "context 1k-2k"),
        (2047, "context 1k-2k"),
        (2048, "context 2k-8k"),
        (8192, "context 8k+"),
        (10**6, "context 8k+"),
    ],
)
def test_a_context_begins_at_its_bound(tokens: int, name: str) -> None:
    assert context_slices(np.array([tokens]), POLICY.context_bounds).tolist() == [name]


def test_bounds_that_are_no_thousands_are_named_in_full() -> None:
    assert list(context_names((500, 1536))) == ["context 0-500", "context 500-1536", "context 1536+"]


# --- margins ---


@pytest.mark.parametrize(("margin", "outcome"), [(0.05, "reject"), (0.9, "promote")])
def test_a_slice_may_have_a_margin_of_its_own(margin: float, outcome: str) -> None:
    reports = paired_reports({"short": 0.7, "long": -0.3}, 200)
    assert verdict(reports, slice_margins={"long": margin}).outcome == outcome
    assert verdict(reports, slice_margins={"short": margin}).outcome == "reject"


def test_a_context_may_have_a_margin_of_its_own() -> None:
    reports = long_prompts({500: 0.9, 4000: -0.25})
    assert verdict(reports, slice_margins={"context 2k-8k": 0.9}).outcome == "promote"


def test_a_margin_for_a_slice_that_there_is_not_is_an_error_that_names_field_and_slices() -> None:
    with pytest.raises(ConfigError, match=r"promotion\.slice_margins names 'cod'.*chat, code"):
        verdict(paired_reports({"chat": 0.3, "code": 0.3}, 60), slice_margins={"cod": 0.1})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("alpha: 2", "promotion.alpha"),
        ("alpha: 0", "promotion.alpha"),
        ("slice_margin: -0.1", "promotion.slice_margin"),
        ("slice_margin: .nan", "promotion.slice_margin"),
        ("slice_margins: {chat: -0.1}", "promotion.slice_margins.chat"),
        ("min_gain: -1", "promotion.min_gain"),
        ("context_bounds: [2048, 1024]", "promotion.context_bounds"),
        ("context_bounds: [0]", "promotion.context_bounds.0"),
        ("max_verdicts: 21", "promotion.max_verdicts"),
        ("cycle_s: 0", "promotion.cycle_s"),
        ("slice_margn: 0.1", "promotion.slice_margn"),
    ],
)
def test_a_policy_that_makes_no_sense_is_an_error_that_names_the_field(wrong: str, named: str, tmp_path: Any) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"promotion: {{{wrong}}}")
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        Policy.load(path)
