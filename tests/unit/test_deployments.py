"""prefect.yaml: every flow is deployed, none from a file path, late runs do not queue up, schedules are off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import automations

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "prefect.yaml").read_text())
ALL: dict[str, dict[str, Any]] = {d["name"]: d for d in FILE["deployments"]}


def test_every_flow_has_one_deployment_by_its_dotted_name() -> None:
    flows = {path.stem for path in (ROOT / "flows").glob("*.py") if "@flow" in path.read_text()}
    assert flows == ALL.keys()
    assert {d["entrypoint"] for d in ALL.values()} == {f"flows.{name}.{name}" for name in flows}


@pytest.mark.parametrize("name", ALL)
def test_a_deployment_is_ours_described_and_checks_its_parameters(name: str) -> None:
    assert "tide" in ALL[name]["tags"]
    assert len(ALL[name]["description"]) > 20
    assert ALL[name]["enforce_parameter_schema"] is True


def test_training_has_the_pool_of_the_accelerators_and_nothing_else_has() -> None:
    assert [name for name, d in ALL.items() if d["work_pool"]["name"] == "mi250"] == ["train"]


def test_what_is_scheduled_never_queues_up_and_what_a_verdict_or_a_person_asked_for_is_never_dropped() -> None:
    strategy = {name: d.get("concurrency_limit", {}).get("collision_strategy") for name, d in ALL.items()}
    assert {name for name, d in ALL.items() if "schedules" in d} == {
        name for name, found in strategy.items() if found == "CANCEL_NEW"
    }
    assert {name for name, found in strategy.items() if found == "ENQUEUE"} == {"promote", "rollback"}
    assert {d["concurrency_limit"]["limit"] for d in ALL.values() if "concurrency_limit" in d} == {1}


def test_schedules_are_made_but_off_and_can_be_named() -> None:
    schedules = {name: d["schedules"] for name, d in ALL.items() if "schedules" in d}
    assert schedules.keys() == {"adapt", "harvest", "reconcile", "retain"}
    assert all(not s["active"] and s["slug"] for found in schedules.values() for s in found)
    assert schedules["adapt"][0]["cron"] == f"*/{automations.PERIOD_S // 60} * * * *"


def test_only_what_judges_or_promotes_is_told_where_the_key_lies() -> None:
    told = {n for n, d in ALL.items() if "TIDE_SIGNING_KEY_FILE" in str(d["work_pool"]["job_variables"])}
    assert told == {"adapt", "promote", "rollback"}


def test_what_automations_run_is_deployed() -> None:
    assert {name.partition("/")[0] for name in automations.NEEDED} <= ALL.keys()
