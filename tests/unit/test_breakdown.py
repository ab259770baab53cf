from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.reports import CANDIDATE, report, score
from tide.domain import EvalReport, RequestScore
from tide.promotion.breakdown import by_context_length, by_depth, by_output_length, by_slice


def scored(tokens: int, steps: float, at: tuple[float, ...] = (), slice: str = "chat", prompt: int = 0) -> RequestScore:
    made = score(f"{slice}-{tokens}-{prompt}-{at}", tokens, 1, slice)
    return made.model_copy(update={"verify_steps": steps, "accepted_at": at, "prompt_tokens": prompt})


def report_of(*scores: RequestScore) -> EvalReport:
    return report(CANDIDATE, scores)


def test_a_depth_s_share_is_of_all_verify_steps_pooled_over_requests() -> None:
    found = by_depth(report_of(scored(20, 10, (6, 3, 1)), scored(40, 30, (10, 1, 0))))
    assert found == pytest.approx((16 / 40, 4 / 40, 1 / 40))


def test_requests_recorded_without_depths_are_left_out_of_them_and_alone_give_none() -> None:
    old = scored(90, 70)
    assert by_depth(report_of(old, scored(20, 10, (6, 3, 1)))) == pytest.approx((0.6, 0.3, 0.1))
    assert by_depth(report_of(old)) == ()


def test_a_slice_s_length_is_tokens_over_steps_not_a_mean_of_requests() -> None:
    chat, code = by_slice(report_of(scored(100, 50), scored(10, 10), scored(30, 10, slice="code")))
    assert (chat.name, chat.requests, chat.acceptance_length) == ("chat", 2, 110 / 60)
    assert (code.name, code.requests, code.acceptance_length) == ("code", 1, 3.0)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, "0"), (1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (127, "64-127"), (128, "128-255")],
)
def test_a_length_s_bucket_is_between_powers_of_two(tokens: int, bucket: str) -> None:
    (group,) = by_output_length(report_of(scored(tokens, 1)))
    assert group.name == bucket


def test_buckets_are_in_the_order_of_length_not_of_name() -> None:
    found = by_output_length(report_of(scored(1000, 2), scored(9, 3), scored(70, 5)))
    assert [g.name for g in found] == ["8-15", "64-127", "512-1023"]


def test_a_prompt_of_unknown_length_is_no_short_prompt() -> None:
    found = by_context_length(report_of(scored(9, 3, prompt=300), scored(8, 4), scored(7, 7, prompt=1)))
    assert [(g.name, g.tokens) for g in found] == [("unknown", 8), ("1", 7), ("256-511", 9)]


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=20))
def test_every_token_and_every_step_is_in_one_group(pairs: list[tuple[int, int]]) -> None:
    made = report_of(*(scored(tokens, steps, slice=f"s{tokens % 3}", prompt=tokens % 7) for tokens, steps in pairs))
    for groups in (by_slice(made), by_output_length(made), by_context_length(made)):
        assert sum(g.requests for g in groups) == len(pairs)
        assert sum(g.tokens for g in groups) == sum(t for t, _ in pairs)
        assert sum(g.verify_steps for g in groups) == sum(s for _, s in pairs)
