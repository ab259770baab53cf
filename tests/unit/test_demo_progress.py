"""The demo's time to go: from the plan at first, from the pace of this machine as soon as it shows."""

from __future__ import annotations

import re

import pytest

from tide.demo.progress import Progress


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [int(found) for found in re.findall(r"about (\d+) min to go", capsys.readouterr().out)]


def test_a_step_that_runs_three_times_slower_than_planned_corrects_the_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    progress = Progress([("serve", 600.0), ("train", 600.0)], clock)
    with progress.step("serve") as detail:
        clock.now = 900.0
        detail("160/320 requests")  # half in 900 s: 900 s more, and the rest at twice the plan (between 1 and 3)
        clock.now = 1800.0
    with progress.step("train"):
        pass
    assert told(capsys) == [20, (900 + 1200) // 60, 20]


def test_a_report_without_a_count_leaves_the_plan_s_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress([("serve", 600.0)], clock).step("serve") as detail:
        clock.now = 120.0
        detail("drift: retrain")
        clock.now = 240.0
        detail("3/320 requests")  # too early to tell
    assert told(capsys) == [10, 8, 6]


def test_reports_come_at_most_every_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress([("serve", 60.0)], clock).step("serve") as detail:
        for second in range(20):
            clock.now = float(second)
            detail("working")
    assert capsys.readouterr().out.count("working") == 3
