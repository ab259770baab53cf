"""The operator's drill in parts: what they come to together, and a plan that is kept."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.drills.cycle import begins_anew, remembered
from tests.drills.cycle_report import COUNTED, REPORT, ROUNDS, Kill, Round, rounds, together

PLAN = [Kill(number, "flow", None) for number in range(5)]


def asked(home: Path, part: str = "1/1", seed: int = 1) -> argparse.Namespace:
    return argparse.Namespace(home=home, part=part, seed=seed, kills=5, boundaries=False, victim=None)


def seen(home: Path, numbers: list[int], **counted: int) -> Path:
    home.mkdir(exist_ok=True)
    made = [Round(number, "flow", None, landed=True, seconds=float(number)) for number in numbers]
    (home / ROUNDS).write_text("".join(json.dumps(asdict(one)) + "\n" for one in made))
    report = {**dict.fromkeys(COUNTED, 0), **counted, "victims": {"flow": len(numbers)}, "seed": 1}
    (home / REPORT).write_text(json.dumps(report))
    return home


def test_parts_share_the_rounds_among_them(tmp_path: Path) -> None:
    halves = []
    for part in ("1/2", "2/2"):
        (home := tmp_path / part[0]).mkdir()
        halves.append(remembered(asked(home, part), PLAN))
    assert [[kill.number for kill in half] for half in halves] == [[0, 2, 4], [1, 3]]


def test_a_fault_of_any_part_is_a_fault_of_the_whole(tmp_path: Path) -> None:
    parts = [seen(tmp_path / "a", [0, 2, 4], kills=3), seen(tmp_path / "b", [1, 3], kills=2, lost_shards=1)]
    whole = together(parts)
    assert (whole["kills"], whole["lost_shards"], whole["victims"]) == (5, 1, {"flow": 5})
    assert (whole["round_s"], whole["parts"]) == (2.0, 2)


def test_a_drill_that_goes_on_keeps_the_plan_it_began_with(tmp_path: Path) -> None:
    assert remembered(asked(tmp_path), PLAN) == PLAN
    assert remembered(asked(tmp_path), PLAN[:2]) == PLAN
    with pytest.raises(SystemExit, match=r"asked for .*'seed': 1"):
        remembered(asked(tmp_path, seed=2), PLAN)


def test_a_drill_that_is_through_begins_anew_and_one_that_is_not_goes_on(tmp_path: Path) -> None:
    remembered(asked(tmp_path), PLAN)
    seen(tmp_path, [0, 1, 2, 3])
    assert not begins_anew(tmp_path)
    assert len(rounds(tmp_path)) == 4
    seen(tmp_path, [0, 1, 2, 3, 4])
    assert begins_anew(tmp_path)
    assert rounds(tmp_path) == []
