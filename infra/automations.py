"""TIDE's automations: what the Prefect server does by itself when something happens, or stops happening.

Owns the automations and that applying them again changes nothing. `tide up` applies them; for a server of one's own:

    python -m infra.automations          apply to the server at PREFECT_API_URL
    python -m infra.automations --print  as JSON, for `prefect automation create --from-file`

They look at runs with the tag ``tide`` only. One that exists under its name with this version is left as it is, so that
a notification that somebody added, or a switch that was turned off, stays.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from infra.prefect_access import server_at
from tide.errors import NotThere, ServiceError, TideError
from tide.prefect_api import PrefectApi
from tide.recovery.rules import BEAT_S, BEATS
from tide.watching import events

VERSION = "[tide automations 1]"
"""Stands in every description; another one replaces what is there."""
PERIOD_S, PERIODS = 900, 4
"""Seconds between cycles of the schedule, and how many may pass without one that finished."""
NEEDED = ("adapt/adapt", "reconcile/reconcile")
"""Deployments that automations run."""

_HEARTBEAT = "prefect.flow-run.heartbeat"
_NO_LONGER_RUNNING = (
    "Completed", "Cached", "Failed", "TimedOut", "Crashed", "Cancelled", "RolledBack",
    "Paused", "Suspended", "Resuming", "Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot",
)  # fmt: skip
"""Names of states after which no heartbeat is owed: a run that waits for a person has none."""
_OURS = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.tide"}


def wanted(deployments: Mapping[str, str], *, beat_s: int = BEAT_S) -> list[dict[str, Any]]:
    """All automations.

    Args:
        deployments: id by ``flow/deployment``; of `NEEDED` at least.
        beat_s: seconds between heartbeats of the runs that are watched.
    """
    return [
        _crashed(beat_s),
        _reconcile(deployments["reconcile/reconcile"]),
        _adapt(deployments["adapt/adapt"]),
        _stalled(deployments["adapt/adapt"], deployments["reconcile/reconcile"]),
    ]


def _crashed(beat_s: int) -> dict[str, Any]:
    """A dead worker leaves its run RUNNING for ever, with its slot.

    The server's own clock decides: after an outage of the server longer than ``within``, runs that went on are marked
    too, for no heartbeat reached it. That costs a repeated step and no data: every step is keyed.
    """
    ends = [f"prefect.flow-run.{name}" for name in _NO_LONGER_RUNNING]
    trigger = {
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": _OURS,
        "for_each": ["prefect.resource.id"],
        "after": [_HEARTBEAT],
        "expect": [_HEARTBEAT, *ends],
        "within": BEATS * beat_s,
    }
    action = {
        "type": "change-flow-run-state",
        "state": "CRASHED",
        "message": f"no heartbeat for {BEATS * beat_s} s: its process or its worker has died",
    }
    why = f"A run whose heartbeats stopped for {BEATS} beats has crashed; its slot is free again."
    return _automation("tide: silent runs have crashed", why, "Proactive", trigger, action)


def _reconcile(reconcile: str) -> dict[str, Any]:
    trigger = {
        "match": {"prefect.resource.id": "tide.draft.*"},
        "expect": [events.DRAFT_PROMOTED, events.DRAFT_ROLLED_BACK],
    }
    why = "What serves has changed: every replica is looked at now, not at the next scheduled reconcile."
    return _automation("tide: reconcile after a change of what serves", why, "Reactive", trigger, _run(reconcile))


def _adapt(adapt: str) -> dict[str, Any]:
    trigger = {"match": {"prefect.resource.id": f"{events.ALERT}*"}, "expect": [events.DRIFT_DETECTED]}
    why = (
        f"A monitor outside of the cycle saw drift and emitted {events.DRIFT_DETECTED} about {events.ALERT}NAME. The "
        "cycle's own event is about tide.service.* and starts nothing: no loop."
    )
    return _automation("tide: adapt when a monitor reports drift", why, "Reactive", trigger, _run(adapt))


def _stalled(adapt: str, reconcile: str) -> dict[str, Any]:
    """Armed by a cycle that completed, so that it is silent where the schedule is off; fires once for each stall."""
    completed = "prefect.flow-run.Completed"
    trigger = {
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {"prefect.resource.role": "deployment", "prefect.resource.id": f"prefect.deployment.{adapt}"},
        "after": [completed],
        "expect": [completed],
        "within": PERIODS * PERIOD_S,
    }
    why = (
        f"No cycle has completed for {PERIODS} periods of {PERIOD_S} s. Reconcile looks for what may hold them up, "
        "such as a leaked slot; add a notification of yours to this automation."
    )
    return _automation("tide: no cycle has finished", why, "Proactive", trigger, _run(reconcile))


def _automation(
    name: str, why: str, posture: str, trigger: Mapping[str, Any], action: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"{why} {VERSION}",
        "enabled": True,
        "trigger": {"type": "event", "posture": posture, "threshold": 1, "within": 0, **trigger},
        "actions": [action],
    }


def _run(deployment: str) -> dict[str, Any]:
    return {"type": "run-deployment", "source": "selected", "deployment_id": deployment}


# The server


def apply(api: str, *, beat_s: int = BEAT_S) -> list[str]:
    """Make the automations that a server lacks, and replace those of another version. Returns the names changed.

    Args:
        api: address, with ``/api``.

    Raises:
        ServiceError: a deployment is missing, or the server refused.
        ConfigError: it wants a password, or another one.
    """
    changed = []
    server = server_at(api)
    found = {a["name"]: a for a in server.call("POST", "automations/filter", {"limit": 200})}
    for automation in wanted(deployments_of(server), beat_s=beat_s):
        there = found.get(automation["name"])
        if there is not None and there["description"] == automation["description"]:
            continue
        if there is None:
            server.call("POST", "automations/", automation)
        else:
            server.call("PUT", f"automations/{there['id']}", automation)
        changed.append(str(automation["name"]))
    return changed


def deployments_of(server: PrefectApi) -> dict[str, str]:
    """Ids of the deployments that automations run. Raises ServiceError when one is missing."""
    found = {}
    for name in NEEDED:
        try:
            found[name] = str(server.call("GET", f"deployments/name/{name}")["id"])
        except NotThere as error:
            raise ServiceError(f"automations run {name}: `prefect deploy --all` first: {error}") from error
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply, or print."""
    parser = argparse.ArgumentParser(prog="python -m infra.automations", description=__doc__.partition("\n")[0])
    parser.add_argument("--api", default=os.environ.get("PREFECT_API_URL", ""), help="default: PREFECT_API_URL")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print them as JSON, change nothing")
    given = parser.parse_args(arguments)
    if not given.api:
        parser.error("which server? set PREFECT_API_URL or --api (`tide env` prints it)")
    try:
        if given.only_print:
            print(json.dumps(wanted(deployments_of(server_at(given.api))), indent=2))
            return 0
        changed = apply(given.api)
    except TideError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print(f"changed: {', '.join(changed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
