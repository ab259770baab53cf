"""What the doctor finds in Prefect: the server, the deployments, a worker for each pool, and who mends after a crash.

Reads only, over the API. Knows nothing of what the flows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tide.prefect_api import PrefectApi
from tide.watching.findings import Check, guarded

DEPLOYMENTS = ("adapt", "harvest", "promote", "reconcile", "retain", "rollback", "train")
_UNATTENDED = ("adapt", "reconcile")
"""What runs by itself where nobody looks: the cycle, and what mends after a crash."""


def of_environment() -> list[Check]:
    """Every check of the server that PREFECT_API_URL names."""
    return guarded("prefect", lambda: iter(examine(PrefectApi.from_environment())))


def examine(api: PrefectApi) -> list[Check]:
    """Every check of one server; when it does not answer, only that.

    Raises:
        ServiceError: it answers at first, and then refuses.
    """
    checks = guarded("prefect", lambda: _server(api))
    if any(check.state != "ok" for check in checks):
        return checks
    found: list[dict[str, Any]] = api.call(
        "POST", "deployments/filter", {"deployments": {"tags": {"all_": ["tide"]}}, "limit": 200}
    )
    checks += guarded("deployments", lambda: _deployments(found))
    for pool in sorted({d["work_pool_name"] for d in found if d.get("work_pool_name")}):
        checks += guarded(f"pool {pool}", lambda name=pool: _pool(api, name))  # type: ignore[misc]
    return checks + guarded("schedules", lambda: _schedules(found))


def _server(api: PrefectApi) -> Iterator[Check]:
    version = api.call("GET", "admin/version")
    yield Check(name="prefect", state="ok", detail=f"{api.url}, version {version}")


def _deployments(found: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    missing = sorted(set(DEPLOYMENTS) - {d["name"] for d in found})
    if missing:
        fix = "`tide up` applies them; on a server of your own `prefect deploy --all`"
        yield Check(name="deployments", state="wrong", detail=f"{', '.join(missing)} not there", fix=fix)
    elif paused := sorted(d["name"] for d in found if d.get("paused")):
        detail, fix = f"{', '.join(paused)} paused", "resume it in the UI: its schedules start nothing"
        yield Check(name="deployments", state="wrong", detail=detail, fix=fix)
    else:
        yield Check(name="deployments", state="ok", detail=", ".join(DEPLOYMENTS))


def _pool(api: PrefectApi, pool: str) -> Iterator[Check]:
    name = f"pool {pool}"
    if api.call("GET", f"work_pools/{pool}").get("is_paused"):
        fix = f"`prefect work-pool resume {pool}`"
        yield Check(name=name, state="wrong", detail="is paused: nothing starts on it", fix=fix)
    workers = api.call("POST", f"work_pools/{pool}/workers/filter", {})
    online = sorted(worker["name"] for worker in workers if worker["status"] == "ONLINE")
    if online:
        yield Check(name=name, state="ok", detail=f"{', '.join(online)} online")
    else:
        fix = f"`tide up` starts one; on a host of its own `prefect worker start --pool {pool}`"
        yield Check(name=name, state="wrong", detail="no worker is online: runs stay Late", fix=fix)


def _schedules(found: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    on = sorted(d["name"] for d in found if any(s["active"] for s in d["schedules"]))
    yield Check(name="schedules", state="ok", detail=f"on: {', '.join(on) or 'none'}")
    for deployment in sorted(found, key=lambda d: str(d["name"])):
        name, schedules = deployment["name"], deployment["schedules"]
        if name in _UNATTENDED and name not in on and schedules:
            fix = f"`prefect deployment schedule resume {name}/{name} {schedules[0]['id']}`"
            yield Check(name=f"schedule of {name}", state="note", detail=_OFF[name], fix=fix)


_OFF = {
    "adapt": "off: a cycle runs when somebody starts one, or a monitor's event does",
    "reconcile": "off: what a crash leaves (a run that holds its pool's place) stays until `tide run reconcile`",
}
