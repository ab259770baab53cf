"""The demo's protocol: arms are interleaved and rotated on the same prompts, and figures are pooled."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tide.demo import plan as plans
from tide.demo import report as reports
from tide.demo import statics
from tide.demo.load import BackgroundLoad, serve
from tide.demo.measure import Arm, compare, ratios
from tide.demo.traffic import Prompt, with_gate_share
from tide.domain import Split
from tide.errors import EngineUnavailable

A, B = "a" * 64, "b" * 64


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(conversation=f"c{i}", slice="s", messages=({"role": "user", "content": f"question {i}"},))
        for i in range(count)
    ]


def test_arms_take_turns_in_an_order_that_rotates() -> None:
    engine, order = FakeEngine(acceptance={A: 2.0}), []

    def arm(name: str, draft: str) -> Arm:
        def prepare() -> FakeEngine:
            order.append(name)
            if engine.active_draft() != draft:
                engine.swap_draft(draft)
            return engine

        return Arm(name, prepare)

    arms = [arm("static", B), arm("adapted", A)]
    results = compare(arms, prompts(5), plan={1: 2, 4: 4}, repeats=2, max_new_tokens=32)
    assert order == ["static", "adapted", "adapted", "static"] * 2
    assert engine.flushes == len(order)
    assert results["adapted"].acceptance_length == pytest.approx(2.0)
    assert results["static"].acceptance_length == pytest.approx(1.0)
    assert {c: len(r) for c, r in results["static"].repeats.items()} == {"1": 2, "4": 2}
    assert set(ratios(results, "adapted", "static")) == {"1", "4"}


def test_a_ratio_is_the_median_over_repeats_and_not_of_the_medians() -> None:
    def arm(*rates: float) -> object:
        from tide.demo.measure import ArmResult

        return ArmResult(acceptance_length=1.0, output_tokens_per_s={"1": rates[1]}, repeats={"1": rates})

    results = {"x": arm(10.0, 30.0, 20.0), "y": arm(10.0, 10.0, 40.0)}
    assert ratios(results, "x", "y") == {"1": 1.0}  # type: ignore[arg-type]


def test_one_failed_request_is_counted_and_the_load_goes_on() -> None:
    engine = FakeEngine()
    result = serve(engine, [*prompts(3), Prompt(conversation="c", slice="s", messages=())], workload="w",
                   concurrency=2, max_new_tokens=8)  # fmt: skip
    assert (len(result.served), result.failed) == (3, 1)


def test_a_load_that_fails_altogether_is_an_error() -> None:
    engine = FakeEngine()
    engine.healthy = False
    with pytest.raises(EngineUnavailable):
        serve(engine, prompts(2), workload="w", concurrency=1, max_new_tokens=8)


def test_background_load_trickles_until_it_is_pressed_and_ends_with_its_block() -> None:
    engine = FakeEngine()
    with BackgroundLoad(engine, prompts(3), workload="w", max_new_tokens=8, pause_s=30.0) as load:
        deadline = time.monotonic() + 10
        while not load.served and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(load.served) == 1
        load.press()
        while len(load.served) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    served = len(load.served)
    assert served >= 6
    time.sleep(0.05)
    assert len(load.served) == served


def test_the_picture_is_drawn_from_measured_requests(tmp_path: Path) -> None:
    engine = FakeEngine(acceptance={A: 2.0}, draft=A)
    served = serve(engine, prompts(30), workload="before", concurrency=2, max_new_tokens=16).served
    reports.draw(tmp_path / "p.png", served, [reports.Mark(at=served[10].at, label="promotion")])
    assert (tmp_path / "p.png").stat().st_size > 5_000


@pytest.mark.parametrize("plan", [plans.FULL, plans.FAST], ids=["full", "fast"])
def test_the_static_draft_gets_at_least_as_many_steps_as_the_adapted_one(plan: plans.Plan) -> None:
    assert plan.static_steps >= plan.adapted_steps
    policy = plans.policy(plan, plan.adapted_steps)
    assert policy.train.max_steps == plan.adapted_steps
    assert policy.drift.min_requests < plan.second_look_requests
    assert policy.drift.baseline_requests < plan.baseline_requests


def test_the_kept_static_draft_is_another_ones_when_anything_it_was_made_from_changes(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_text("{}")
    policy = plans.policy(plans.FAST, 10)
    key = statics.key(tmp_path, policy, prompts(3), 48)
    assert key == statics.key(tmp_path, policy, prompts(3), 48)
    assert key != statics.key(tmp_path, plans.policy(plans.FAST, 11), prompts(3), 48)
    assert key != statics.key(tmp_path, policy, prompts(4), 48)
    assert key != statics.key(tmp_path, policy, prompts(3), 49)
    (tmp_path / "contract.json").write_text('{"weights": 1}')
    assert key != statics.key(tmp_path, policy, prompts(3), 48)


def test_a_short_demo_serves_enough_gate_conversations_and_loses_no_prompt() -> None:
    def split(conversation: str) -> Split:
        return Split.GATE if conversation.endswith("0") else Split.TRAIN

    ordered = with_gate_share(prompts(100), 0.25, split)
    assert sum(split(p.conversation) is Split.GATE for p in ordered[:24]) == 6
    assert sorted(p.conversation for p in ordered) == sorted(p.conversation for p in prompts(100))
