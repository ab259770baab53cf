"""Operating it, on a real Prefect server, real workers and a real lakeFS: what is refused, repaired, and never doubled.

The tests share one pipeline and run in order: a training that was killed at the beginning is looked at again at the
end, when three heartbeats are missing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import automations, prefect, schedules
from tests.drills.cycle_books import DRAFTS, Books
from tests.drills.cycle_report import Kill
from tests.drills.cycle_round import Drill
from tests.support.operated import BEAT_S, FINAL, IMPATIENT, Pipeline, kill, wait_for
from tests.support.operating import pipeline
from tide.cycles import KIND, Cycle
from tide.lineage import ledger
from tide.recovery import rules as recovery
from tide.recovery.rules import ReconcileReport
from tide.serving.serving_file import read_serving
from tide.watching import doctor_prefect

LATE = 24 if os.environ.get("TIDE_DRILL") else 8
"""Runs that were missed: a night of them in `make drill`, an hour in `make test`."""


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pipeline(tmp_path_factory.mktemp("operated"), train_s=1.0) as made:
        automations.apply(prefect.api_url(made.port), beat_s=BEAT_S)
        yield made


@pytest.fixture(scope="module")
def orphan(pipe: Pipeline) -> dict[str, Any]:
    """A training whose flow and worker were killed, and when; the worker is back.

    Its run has its place in the pool until it is known to be dead: the pool takes two meanwhile, for the other tests.
    """
    pipe.call("PATCH", "work_pools/mi250", {"concurrency_limit": 2})
    pipe.fill()
    assert pipe.finished(pipe.run("harvest/harvest")) == "COMPLETED"
    run = hung_training(pipe, "candidate-killed")
    time.sleep(2)  # for its first heartbeat to arrive
    pipe.kill_worker("mi250")
    kill(pipe.flows()[run].pid)
    pipe.start_worker("mi250")
    return {"run": run, "at": time.monotonic()}


def hung_training(pipe: Pipeline, branch: str) -> str:
    """A training run whose trainer makes no progress; returns when its processes are there."""
    id = pipe.call("GET", "deployments/name/train/train")["id"]
    body = {
        "parameters": {"branch": branch},
        "job_variables": {"env": {"DRILL_TRAIN_S": "-1"}},
        "state": {"type": "SCHEDULED"},
    }
    run = str(pipe.call("POST", f"deployments/{id}/create_flow_run", body)["id"])
    assert wait_for(lambda: len(pipe.trainers()) == 2, 120), pipe.state(run)
    return run


def refused(pipe: Pipeline, deployment: str, parameters: dict[str, Any]) -> str:
    id = pipe.call("GET", f"deployments/name/{deployment}")["id"]
    address = f"{prefect.api_url(pipe.port)}/deployments/{id}/create_flow_run"
    answer = httpx.post(address, json={"parameters": parameters}, timeout=60, trust_env=False)
    assert answer.status_code == 409, answer.text
    return answer.text


@pytest.mark.parametrize(
    ("deployment", "parameters", "field"),
    [
        ("adapt/adapt", {"force": "perhaps"}, "force"),
        ("train/train", {"states_ref": "main"}, "branch"),
        ("train/train", {"branch": "b", "drift": {"decision": "maybe"}}, "drift"),
        ("reconcile/reconcile", {"patience": {"silent_s": -1}}, "silent_s"),
        ("rollback/rollback", {"expected_generation": "the last"}, "expected_generation"),
    ],
)
def test_wrong_parameters_are_refused_by_the_server_with_the_field_named(
    pipe: Pipeline, deployment: str, parameters: dict[str, Any], field: str
) -> None:
    assert field in refused(pipe, deployment, parameters)


def test_the_doctor_finds_server_deployments_and_workers_well_and_says_what_would_mend_by_itself(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect.api_url(pipe.port))
    found = {check.name: check for check in doctor_prefect.of_environment()}
    states = {name: check.state for name, check in found.items()}
    well = dict.fromkeys(("prefect", "deployments", "pool cpu", "pool mi250", "schedules"), "ok")
    assert states == well | {"schedule of adapt": "note", "schedule of reconcile": "note"}
    schedule = found["schedule of reconcile"].fix.strip("`").split()[-1]
    id = pipe.call("GET", "deployments/name/reconcile/reconcile")["id"]
    assert [one["id"] for one in pipe.call("GET", f"deployments/{id}/schedules")] == [schedule]


def test_a_training_whose_flow_was_killed_is_ended_by_reconcile_though_its_run_looks_alive(
    pipe: Pipeline, orphan: dict[str, Any]
) -> None:
    assert pipe.state(orphan["run"]) == "RUNNING"
    assert len(pipe.trainers()) == 2
    assert pipe.finished(pipe.run("reconcile/reconcile")) == "COMPLETED"
    assert pipe.trainers() == []
    report = ledger.every(pipe.store, DRAFTS, "reconcile", ReconcileReport)[-1]
    assert [(r.kind, r.outcome) for r in report.repairs] == [("process", "mended")]


def test_late_runs_and_a_doubled_window_do_the_work_once(pipe: Pipeline) -> None:
    """The worker was down overnight; then all that was missed runs at once, and one window twice."""
    pipe.fill()
    pipe.kill_worker("cpu")
    now = datetime.now(UTC)
    runs = []
    for number in range(LATE + 1):
        flow = ("adapt", "harvest")[number % 2]
        id = pipe.call("GET", f"deployments/name/{flow}/{flow}")["id"]
        due = now - timedelta(minutes=5 * max(1, LATE - number))
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": due.isoformat()}}
        runs.append(str(pipe.call("POST", f"deployments/{id}/create_flow_run", {"state": state})["id"]))
    pipe.start_worker("cpu")
    assert wait_for(lambda: all(pipe.state(run) in FINAL for run in runs), 300)
    ends = [pipe.state(run) for run in runs]
    assert set(ends) <= {"COMPLETED", "CANCELLED"}, ends
    assert wait_for(lambda: not [r for r in pipe.waiting() if r["work_pool_name"] == "cpu"], 120)
    found = Books(pipe).read_back()
    assert (found.lost, found.doubled) == ([], [])
    assert len(ledger.every(pipe.store, DRAFTS, KIND, Cycle)) == 1
    assert len(Books(pipe).trained()) == 1
    assert read_serving(pipe.store, DRAFTS).generation == 1


def test_a_promotion_makes_reconcile_look_at_the_replicas_at_once(pipe: Pipeline) -> None:
    def by_automation() -> list[Any]:
        runs = pipe.call("POST", "flow_runs/filter", {"flows": {"name": {"any_": ["reconcile"]}}})
        return [run for run in runs if (run["created_by"] or {}).get("type") == "AUTOMATION"]

    assert wait_for(by_automation, 60)


def test_cancelling_a_hung_training_leaves_no_process_of_it(pipe: Pipeline) -> None:
    run = hung_training(pipe, "candidate-cancelled")
    pipe.call("POST", f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    assert wait_for(lambda: not pipe.trainers(), 120)
    assert pipe.finished(run, 120) == "CANCELLED"


def test_automations_are_applied_once_and_what_somebody_changed_stays(pipe: Pipeline) -> None:
    api = prefect.api_url(pipe.port)
    assert automations.apply(api, beat_s=BEAT_S) == []
    [first, *_] = pipe.call("POST", "automations/filter", {})
    pipe.call("PATCH", f"automations/{first['id']}", {"enabled": False})
    assert automations.apply(api, beat_s=BEAT_S) == []
    assert pipe.call("GET", f"automations/{first['id']}")["enabled"] is False
    pipe.call("PATCH", f"automations/{first['id']}", {"enabled": True})


def test_a_schedule_that_was_turned_on_stays_on_when_the_deployments_are_applied_again(pipe: Pipeline) -> None:
    api = prefect.api_url(pipe.port)
    assert schedules.active(api) == set()
    deployment = pipe.call("GET", "deployments/name/retain/retain")
    wanted = {(deployment["id"], deployment["schedules"][0]["slug"])}
    assert schedules.turn_on(api, wanted) == 1
    assert schedules.active(api) == wanted
    assert schedules.turn_on(api, wanted) == 0
    path = f"deployments/{deployment['id']}/schedules/{deployment['schedules'][0]['id']}"
    pipe.call("PATCH", path, {"active": False})


def test_a_retry_under_a_limit_of_one_succeeds(pipe: Pipeline, tmp_path: Path) -> None:
    run = pipe.run("fails-once/fails-once", marker=str(tmp_path / "marker"))
    assert pipe.finished(run, 120) == "COMPLETED"
    assert pipe.call("GET", f"flow_runs/{run}")["run_count"] == 2


def test_a_leaked_slot_a_replica_that_differs_and_a_run_nobody_began_are_found_and_mended(pipe: Pipeline) -> None:
    deployment = pipe.call("GET", "deployments/name/harvest/harvest")
    name = deployment["global_concurrency_limit"]["name"]
    assert wait_for(lambda: pipe.slots()[name] == 0, 60)
    pipe.call("POST", "v2/concurrency_limits/increment", {"names": [name], "slots": 1, "mode": "concurrency"})
    assert pipe.finished(pipe.run("harvest/harvest")) == "CANCELLED"
    (pipe.home / "replicas" / "r1").write_text("f" * 64)
    sleeps = pipe.call("GET", "deployments/name/sleeps/sleeps")["id"]
    body = {"parameters": {"seconds": 1}, "state": {"type": "PENDING"}}
    pending = str(pipe.call("POST", f"deployments/{sleeps}/create_flow_run", body)["id"])
    patience = {**IMPATIENT, "silent_s": 600}
    assert pipe.finished(pipe.run("reconcile/reconcile", patience=patience)) == "COMPLETED"
    assert pipe.slots()[name] == 0
    assert pipe.state(pending) == "CRASHED"
    serving = read_serving(pipe.store, DRAFTS).stable
    assert serving is not None
    assert (pipe.home / "replicas" / "r1").read_text() == serving.digest
    repairs = ledger.every(pipe.store, DRAFTS, "reconcile", ReconcileReport)[-1].repairs
    assert {(r.kind, r.outcome) for r in repairs} >= {("slot", "mended"), ("run", "mended"), ("replica", "mended")}
    assert pipe.finished(pipe.run("harvest/harvest")) == "COMPLETED"


def test_a_killed_training_is_crashed_after_three_beats_its_slot_is_usable_and_a_run_that_waits_is_untouched(
    pipe: Pipeline, orphan: dict[str, Any]
) -> None:
    waits = pipe.run("waits/waits")
    assert wait_for(lambda: pipe.state(waits) == "PAUSED", 120)
    due = orphan["at"] + recovery.BEATS * BEAT_S + 45 - time.monotonic()
    assert wait_for(lambda: pipe.state(orphan["run"]) == "CRASHED", max(due, 1.0))
    assert "no heartbeat for 90 s" in pipe.call("GET", f"flow_runs/{orphan['run']}")["state"]["message"]
    pipe.call("PATCH", "work_pools/mi250", {"concurrency_limit": 1})
    assert pipe.finished(pipe.run("train/train", branch="candidate-after"), 120) == "COMPLETED"
    assert pipe.state(waits) == "PAUSED"


@pytest.mark.drill
def test_after_a_kill_between_two_steps_the_next_cycle_finishes_and_the_books_balance(pipe: Pipeline) -> None:
    """One round of `make drill`, which has all boundaries and 50 random moments."""
    drill = Drill(pipe, random.Random(1))
    made = drill.round(Kill(0, "flow", "after roll out"))
    assert made.landed
    assert made.faults == {}
    found = drill.books.read_back()
    assert (found.lost, found.doubled, drill.books.double_trainings()) == ([], [], [])
    assert found.shards == 2 * pipe.windows
