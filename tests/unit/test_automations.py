"""The automations as they are sent to the server: what they wait for, what they do, and that none feeds itself."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from infra import automations, prefect
from tide.recovery.rules import BEAT_S, BEATS, Patience
from tide.watching import events

IDS = {"adapt/adapt": "id-adapt", "reconcile/reconcile": "id-reconcile"}
ALL = {a["name"]: a for a in automations.wanted(IDS)}
CRASHED = ALL["tide: silent runs have crashed"]


def test_a_run_is_marked_crashed_after_three_beats_and_not_before() -> None:
    trigger = CRASHED["trigger"]
    assert trigger["posture"] == "Proactive"
    assert trigger["within"] == BEATS * BEAT_S >= 3 * BEAT_S
    assert CRASHED["actions"] == [
        {"type": "change-flow-run-state", "state": "CRASHED", "message": CRASHED["actions"][0]["message"]}
    ]
    assert automations.wanted(IDS, beat_s=30)[0]["trigger"]["within"] == 90


@pytest.mark.parametrize(
    "state", ["Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused", "AwaitingRetry"]
)
def test_a_run_that_is_over_or_waits_owes_no_heartbeat(state: str) -> None:
    assert f"prefect.flow-run.{state}" in CRASHED["trigger"]["expect"]
    assert f"prefect.flow-run.{state}" not in CRASHED["trigger"]["after"]


def test_only_runs_of_ours_are_judged_by_our_heartbeats() -> None:
    assert CRASHED["trigger"]["match_related"] == {
        "prefect.resource.role": "tag",
        "prefect.resource.id": "prefect.tag.tide",
    }
    assert CRASHED["trigger"]["for_each"] == ["prefect.resource.id"]


def test_the_workers_beat_as_often_as_the_automation_expects_and_reconcile_is_slower() -> None:
    told = prefect.environment(prefect.PREFECT_FILE.parent, 4200, {})
    assert int(told["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == BEAT_S >= 30
    assert Patience().silent_s > BEATS * BEAT_S


def test_prefect_understands_what_bounds_its_database(tmp_path: Path) -> None:
    """A setting that Prefect does not know is ignored without a word."""
    read = """
from prefect.settings import get_current_settings
server = get_current_settings().server
vacuum = server.services.db_vacuum
print(server.events.retention_period.days, vacuum.retention_period.days, sorted(vacuum.enabled_vacuum_types))
print({name: kept.days for name, kept in vacuum.event_retention_overrides.items()})
print(server.concurrency.lease_storage.rpartition(".")[2])
"""
    told = prefect.environment(tmp_path, 4200, os.environ)
    done = subprocess.run([sys.executable, "-c", read], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "3 14 ['events', 'flow_runs', 'orphans']",
        "{'prefect.flow-run.heartbeat': 1}",
        "filesystem",
    ]


def test_what_the_cycle_emits_itself_never_starts_a_cycle() -> None:
    """`adapt` emits tide.drift.detected about the service: an automation that ran it on that would run for ever."""
    for automation in ALL.values():
        if automation["actions"][0].get("deployment_id") != "id-adapt":
            continue
        pattern = automation["trigger"]["match"]["prefect.resource.id"]
        assert not fnmatch(events.of_service("smollm2"), pattern)
        assert not fnmatch(events.of_draft("a" * 64), pattern)
        assert fnmatch(f"{events.ALERT}grafana", pattern)


def test_reconcile_runs_when_what_serves_has_changed_and_causes_none_of_it() -> None:
    trigger = ALL["tide: reconcile after a change of what serves"]["trigger"]
    assert set(trigger["expect"]) == {events.DRAFT_PROMOTED, events.DRAFT_ROLLED_BACK}
    assert fnmatch(events.of_draft("a" * 64), trigger["match"]["prefect.resource.id"])


def test_the_stall_alarm_is_armed_by_a_finished_cycle_and_speaks_after_four_periods() -> None:
    stalled: dict[str, Any] = ALL["tide: no cycle has finished"]
    assert stalled["trigger"]["after"] == stalled["trigger"]["expect"] == ["prefect.flow-run.Completed"]
    assert stalled["trigger"]["within"] == 4 * 900
    assert stalled["trigger"]["match_related"]["prefect.resource.id"] == "prefect.deployment.id-adapt"


def test_every_automation_says_what_it_is_for_and_its_version() -> None:
    assert len(ALL) == len({a["description"] for a in ALL.values()}) == 4
    assert all(a["description"].endswith(automations.VERSION) for a in ALL.values())
    assert all(name.startswith("tide: ") for name in ALL)


def test_without_a_server_the_command_says_which_setting_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(SystemExit):
        automations.main([])
    assert "PREFECT_API_URL" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert automations.main(["--api", "http://127.0.0.1:1/api"]) == 1
    assert "refused" in capsys.readouterr().err.lower()
