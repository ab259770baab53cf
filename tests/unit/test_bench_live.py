"""The benchmark of offline against live: its figures on data whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bench.decisions import corpus, live, speedup
from tide.domain import EngineProfile, ProfilePoint

POINT = ProfilePoint(concurrency=1, plain_step_s=0.05, verify_step_s=0.06, draft_step_s=0.004)
PROFILE = EngineProfile(points=(POINT,))
SPEED = {"workload": "chat", "concurrency": 1, "prompt_tokens": 0, "output_tokens": 40, "steps": 3}


def rows(
    draft: str, source: str, steps: Sequence[int], workload: str = "chat", tokens: int = 40
) -> list[dict[str, Any]]:
    """One request a number of verify steps, each of 40 tokens and a conversation of its own."""
    common = {"workload": workload, "draft": draft, "source": source, "slice": workload, "prompt_tokens": 20}
    return [
        {**common, "request": f"{workload}-{i}", "conversation": f"c{i}", "tokens": tokens}
        | {"verify_steps": n, "proposed": 3 * n, "accepted": tokens - n}
        for i, n in enumerate(steps)
    ]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(corpus, "DATA", tmp_path)
    monkeypatch.setattr(live, "RESAMPLES", 200)

    def made(scores: list[dict[str, Any]], speed: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        pq.write_table(pa.Table.from_pylist(scores, schema=corpus.SCORES_SCHEMA), tmp_path / "scores.parquet")
        if speed is not None:
            (tmp_path / "speed.json").write_text(json.dumps(speed))
            (tmp_path / "profile.json").write_text(PROFILE.to_json())
        figures: dict[str, Any] = live.measure()["offline_live"]
        return figures

    return made


def test_a_walk_that_counts_as_the_engine_does_has_no_error(write: Any) -> None:
    same = [*rows("a", "walk", (20, 25)), *rows("a", "live", (20, 25))]
    found = write([*same, *rows("b", "walk", (30, 35)), *rows("b", "live", (30, 35))])
    assert (found["max_error"], found["ranking_agreement"], found["speedup_error"]) == (0.0, 1.0, None)
    assert found["drafts"]["a"]["interval"] == [0.0, 0.0]
    assert "speed.py" in found["speedup_missing"]


def test_the_error_is_of_the_pooled_length_and_the_worst_draft_counts(write: Any) -> None:
    walk = [*rows("a", "walk", (20, 20)), *rows("b", "walk", (20, 30))]
    found = write([*walk, *rows("a", "live", (20, 20)), *rows("b", "live", (25, 30))])
    assert found["drafts"]["b"]["error"] == pytest.approx(55 / 50 - 1)
    assert found["max_error"] == found["drafts"]["b"]["error"]
    low, high = found["drafts"]["b"]["interval"]
    assert low <= found["drafts"]["b"]["signed"] <= high
    assert low < high


def test_errors_that_cancel_over_workloads_are_seen_within_them(write: Any) -> None:
    walk = [*rows("a", "walk", (20,)), *rows("a", "walk", (30,), "code")]
    found = write([*walk, *rows("a", "live", (25,)), *rows("a", "live", (25,), "code")])
    assert found["max_error"] == pytest.approx(0.0)
    assert found["max_error_by_workload"] == pytest.approx(0.25)


def test_only_requests_that_both_counted_are_compared(write: Any) -> None:
    walk, served = rows("a", "walk", (20, 10, 30)), rows("a", "live", (20, 0, 30))
    found = write([*walk, *served[:2]])
    assert found["drafts"]["a"]["requests"] == 1
    assert found["max_error"] == 0.0


def test_drafts_served_at_other_steps_than_walked_are_an_error(write: Any) -> None:
    served = [row | {"proposed": row["verify_steps"]} for row in rows("a", "live", (20,))]
    with pytest.raises(ValueError, match="walked at 3 and served at 1"):
        write([*rows("a", "walk", (20,)), *served])


def test_a_pair_ordered_otherwise_is_counted_and_shown_and_a_close_one_too(write: Any) -> None:
    steps = {"a": ((20, 20, 20), (20, 20, 20)), "b": ((30, 30, 30), (30, 30, 30)), "c": ((19, 19, 19), (21, 25, 15))}
    scores = [row for d, (w, s) in steps.items() for row in [*rows(d, "walk", w), *rows(d, "live", s)]]
    found = write(scores)
    assert found["ranking_pairs"] == 3
    assert found["ranking_agreement"] == pytest.approx(2 / 3)
    low, high = found["ranking_interval"]
    assert low < 2 / 3 < high
    (shown,) = found["ranking_close_or_wrong"]
    assert (shown["drafts"], shown["close"], shown["agree"]) == (["a", "c"], True, False)
    assert (found["ranking_agreement_clear"], found["ranking_pairs_clear"]) == (1.0, 2)


def test_the_error_of_a_difference_is_that_of_its_conversations() -> None:
    rng = np.random.default_rng(0)

    def scores(steps: Any) -> corpus.Scores:
        n = len(steps)
        name = np.array([str(i) for i in range(n)])
        filled = np.full(n, 40)
        return corpus.Scores(name, name, name, name, filled, filled, steps, 3 * steps, filled - steps)

    drawn = [[speedup.pooled(scores(rng.integers(15, 36, 200))) for _ in range(2)] for _ in range(400)]
    spread = float(np.std([a - b for a, b in drawn]))
    predicted = live.difference_error(scores(rng.integers(15, 36, 200)), scores(rng.integers(15, 36, 200)))
    assert predicted == pytest.approx(spread, rel=0.15)


def condition(draft: str, spec: float, **changes: Any) -> dict[str, Any]:
    return {**SPEED, "draft": draft, "plain_tok_s": 20.0, "spec_tok_s": spec, "acceptance_length": 1.9, **changes}


def test_a_speedup_is_predicted_from_the_walk_of_the_very_requests(write: Any) -> None:
    # Of the two requests the condition served the first alone: 40 tokens in 20 steps.
    scores = [*rows("a", "walk", (20, 40)), *rows("a", "live", (20, 40))]
    expected = (39 * 0.05) / (20 * (0.06 + 3 * 0.004))
    found = write(scores, [condition("a", 20.0 * expected * 1.1, requests=["chat-0"])])
    (one,) = found["speedup"]
    assert (one["walked_requests"], one["offline_length"]) == ("same", 2.0)
    assert one["predicted"] == pytest.approx(expected)
    assert found["speedup_error"] == pytest.approx(1 - 1 / 1.1)
    assert found["speedup_conditions"] == 1


def test_without_the_very_requests_the_workloads_walk_is_taken_and_said(write: Any) -> None:
    found = write([*rows("a", "walk", (20, 40)), *rows("a", "live", (20, 40))], [condition("a", 20.0)])
    assert found["speedup"][0]["walked_requests"] == "workload"
    assert found["speedup"][0]["offline_length"] == pytest.approx(80 / 60)


def test_a_draft_never_walked_and_other_steps_do_not_count_as_offline_predictions(write: Any) -> None:
    speed = [condition("new", 20.0), condition("a", 20.0, steps=1)]
    found = write([*rows("a", "walk", (20, 40)), *rows("a", "live", (20, 40))], speed)
    assert found["speedup_error"] is None
    assert found["speedup_error_other_steps"] is not None
    assert "error" not in found["speedup"][0]


@pytest.mark.parametrize(("length", "expected"), [(1.0, 1.0), (1.875, 1.5), (4.0, 2.0)])
def test_a_length_at_three_steps_says_that_at_one(length: float, expected: float) -> None:
    assert speedup.at_steps(length, 3, 1) == pytest.approx(expected, abs=1e-6)
    assert speedup.at_steps(length, 3, 3) == length
