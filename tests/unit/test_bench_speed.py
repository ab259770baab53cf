"""The collector of measured speeds: what it sends, and what a condition says of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench.decisions import speed
from tests.bench.decisions import speed_loop as loop
from tests.bench.decisions.speed_loop import Arm, Pass, Prompt
from tests.fakes.fake_engine import FakeEngine
from tide.engine.base import Generation

CHAT = ({"role": "user", "content": "one two three"},)
OLD, NEW = "1" * 64, "2" * 64


def arm(engine: FakeEngine, **fields: Any) -> Arm:
    return Arm(engine, **fields)  # type: ignore[arg-type]  # the fake keeps the same port


def prompts(count: int) -> list[Prompt]:
    return [Prompt("chat", f"r{i}", CHAT) for i in range(count)]


def test_the_first_request_of_each_place_is_cut_short_at_another_length() -> None:
    done = loop.serve(arm(FakeEngine(steps=3)), prompts(6), concurrency=4, tokens=48)
    assert [a.completion_tokens for a in done.answers] == [12, 24, 36, 48, 48, 48]


def test_at_concurrency_one_nothing_is_cut() -> None:
    done = loop.serve(arm(FakeEngine(steps=3)), prompts(2), concurrency=1, tokens=48)
    assert [a.completion_tokens for a in done.answers] == [48, 48]


def test_an_arm_brings_its_draft_into_serving_and_empties_the_cache() -> None:
    engine = FakeEngine(steps=3, draft=OLD)
    arm(engine, draft="new", digest=NEW, steps=3).prepare()
    assert (engine.active_draft(), engine.flushes) == (NEW, 1)
    arm(engine).prepare()
    assert (engine.active_draft(), engine.flushes) == (NEW, 2)


def test_every_draft_serves_at_the_last_steps_and_the_first_at_the_others() -> None:
    engines: dict[int, Any] = {1: FakeEngine("one", steps=1), 3: FakeEngine("three", steps=3)}
    found = loop.arms_of(FakeEngine(steps=0), engines, {"a": OLD, "b": NEW})  # type: ignore[arg-type]
    assert [(a.name, a.digest) for a in found] == [("plain", ""), ("a/3", OLD), ("b/3", NEW), ("a/1", OLD)]
    assert [a.engine.name for a in found[1:]] == ["three", "three", "one"]


def made(started: Sequence[float], finished: Sequence[float], tokens: int, steps: int | None) -> Pass:
    answer = Generation(
        request="r",
        text="",
        prompt_tokens=30,
        cached_tokens=10,
        completion_tokens=tokens,
        verify_steps=steps,
        latency_s=1.0,
    )
    return Pass([answer] * len(started), list(started), list(finished))


def test_a_condition_has_medians_of_rates_and_of_ratios_and_the_load_that_it_was() -> None:
    plain = [made([0, 0], [4, 4], 40, None), made([20, 20], [28, 28], 40, None)]
    ours = [made([10, 10], [12, 12], 40, 20), made([40, 42], [42, 44], 40, 20)]
    row = loop.condition(arm(FakeEngine(), draft="a", digest=NEW, steps=3), "chat", 2, plain, ours)
    assert (row["plain_tok_s"], row["spec_tok_s"]) == (15.0, 30.0)
    assert row["speedup_repeats"] == [2.0, 2.0]
    assert (row["acceptance_length"], row["prompt_tokens"], row["output_tokens"]) == (2.0, 20.0, 40.0)
    assert row["histogram"] == {1: 0.5, 2: 0.5}


def test_all_conditions_come_with_their_requests_and_arms_take_turns() -> None:
    plain, three = FakeEngine("p", steps=0), FakeEngine("s", steps=3)
    args = argparse.Namespace(concurrency={1: 2, 2: 4}, repeats=2, tokens=8)
    own = {"chat": prompts(3), "code": [Prompt("code", "", CHAT)]}
    conditions = loop.Conditions([arm(plain), arm(three, draft="a", digest=NEW, steps=3)], own, args)
    told = list(conditions.rounds())
    assert len(told) == len(conditions) == 8
    assert [line.partition(":")[0] for line in told[::4]] == [
        "chat, concurrency 1, repeat 1/2",
        "chat, concurrency 1, repeat 2/2",
    ]
    rows = conditions.rows()
    assert [(r["workload"], r["concurrency"], r["answers"]) for r in rows] == [
        ("chat", 1, 4),
        ("chat", 2, 8),
        ("code", 1, 4),
        ("code", 2, 8),
    ]
    assert rows[0]["requests"] == ["r0", "r1", "r0", "r1"]
    assert rows[2]["requests"] == []
    assert (plain.flushes, three.flushes) == (8, 8)


def test_prompts_are_read_by_workload_with_the_corpus_ids(tmp_path: Path) -> None:
    lines = [
        {"workload": "chat", "request": "r1", "messages": list(CHAT)},
        {"workload": "code", "messages": list(CHAT)},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = loop.read_prompts(path)
    assert found == {"chat": [Prompt("chat", "r1", CHAT)], "code": [Prompt("code", "", CHAT)]}


@pytest.mark.parametrize(("option", "expected"), [(["--concurrency", "1:4,8:9"], {1: 4, 8: 9}), ([], {1: 3, 4: 8})])
def test_the_command_line_gives_numbers(
    option: list[str], expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["speed", "--draft", "a=/x", "--steps", "1,3", *option])
    args = speed.parse()
    assert (args.steps, args.concurrency) == ((1, 3), expected)
