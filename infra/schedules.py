"""Schedules that somebody turned on stay on when the deployments are applied again.

prefect.yaml makes them off, and applying it turns them off again. Owns what is remembered across that. Knows nothing of
what the schedules start.
"""

from __future__ import annotations

from typing import Any

from infra.prefect_access import server_at


def active(api: str) -> set[tuple[str, str]]:
    """(deployment id, slug) of every schedule that is on."""
    return {(d["id"], s["slug"]) for d in _deployments(api) for s in d["schedules"] if s["active"] and s["slug"]}


def turn_on(api: str, wanted: set[tuple[str, str]]) -> int:
    """Turn on those of these that are off; one that is no more is left out. Returns how many were turned on.

    Raises:
        ServiceError: the server refused.
    """
    off = [
        f"deployments/{d['id']}/schedules/{s['id']}"
        for d in _deployments(api)
        for s in d["schedules"]
        if (d["id"], s["slug"]) in wanted and not s["active"]
    ]
    server = server_at(api)
    for path in off:
        server.call("PATCH", path, {"active": True})
    return len(off)


def _deployments(api: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server_at(api).call("POST", "deployments/filter", {"limit": 200})
    return found
