"""What the doctor says of Prefect: the server, the deployments, the pools' workers, the schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tide.errors import ServiceError
from tide.prefect_api import Body, PrefectApi
from tide.watching import doctor_prefect
from tide.watching.doctor_prefect import DEPLOYMENTS
from tide.watching.findings import Check


@dataclass(frozen=True)
class Server(PrefectApi):
    """A server that is as `tide up` leaves it, with every schedule on."""

    url: str = "http://p/api"
    deployments: list[dict[str, Any]] = field(default_factory=lambda: [deployment(name) for name in DEPLOYMENTS])
    workers: dict[str, str] = field(default_factory=lambda: {"cpu": "ONLINE", "mi250": "ONLINE"})
    paused: frozenset[str] = frozenset()

    def call(self, method: str, path: str, body: Body = None, *, secret: bool = False) -> Any:
        if path == "admin/version":
            return "3.9.1"
        if path == "deployments/filter":
            return self.deployments
        _, pool, *rest = path.split("/")
        if rest:
            return [{"name": f"worker-{pool}", "status": self.workers[pool]}]
        return {"is_paused": pool in self.paused}


class Silent(PrefectApi):
    def call(self, method: str, path: str, body: Body = None, *, secret: bool = False) -> Any:
        raise ServiceError("Prefect does not answer")


def deployment(name: str, *, active: bool = True, paused: bool = False) -> dict[str, Any]:
    pool = "mi250" if name == "train" else "cpu"
    schedules = [{"id": f"id-of-{name}", "active": active}]
    return {"name": name, "work_pool_name": pool, "paused": paused, "schedules": schedules}


def found(server: PrefectApi) -> dict[str, Check]:
    return {check.name: check for check in doctor_prefect.examine(server)}


def test_a_server_as_it_should_be_is_well() -> None:
    checks = found(Server())
    assert {check.state for check in checks.values()} == {"ok"}
    assert set(checks) == {"prefect", "deployments", "pool cpu", "pool mi250", "schedules"}


def test_a_server_that_does_not_answer_is_the_only_finding() -> None:
    (check,) = doctor_prefect.examine(Silent("http://p/api"))
    assert (check.name, check.state, check.detail) == ("prefect", "unknown", "Prefect does not answer")


def test_a_home_without_an_address_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (check,) = doctor_prefect.of_environment()
    assert check.state == "unknown"
    assert "PREFECT_API_URL is not set" in check.detail


def test_deployments_that_are_missing_or_paused_are_named() -> None:
    without = [deployment(name) for name in DEPLOYMENTS if name != "train"]
    missing = found(Server(deployments=without))["deployments"]
    assert (missing.state, missing.detail) == ("wrong", "train not there")
    assert "prefect deploy --all" in missing.fix
    stopped = [deployment(name, paused=name == "adapt") for name in DEPLOYMENTS]
    assert found(Server(deployments=stopped))["deployments"].detail == "adapt paused"


def test_a_pool_without_a_worker_or_that_is_paused_is_wrong_and_says_what_starts_it() -> None:
    checks = found(Server(workers={"cpu": "ONLINE", "mi250": "OFFLINE"}))
    assert checks["pool cpu"].state == "ok"
    assert checks["pool mi250"].state == "wrong"
    assert "prefect worker start --pool mi250" in checks["pool mi250"].fix
    checks = {c.detail: c for c in doctor_prefect.examine(Server(paused=frozenset({"cpu"})))}
    assert checks["is paused: nothing starts on it"].fix == "`prefect work-pool resume cpu`"


def test_a_reconcile_that_nothing_starts_is_noted_with_the_command_that_turns_it_on() -> None:
    off = [deployment(name, active=name == "harvest") for name in DEPLOYMENTS]
    checks = found(Server(deployments=off))
    assert checks["schedules"].detail == "on: harvest"
    assert checks["schedule of reconcile"].state == "note"
    assert checks["schedule of reconcile"].fix == (
        "`prefect deployment schedule resume reconcile/reconcile id-of-reconcile`"
    )
    assert "schedule of retain" not in checks
