"""Schedules that somebody turned on stay on when the deployments are applied again.

prefect.yaml makes them off, and applying it turns them off again. Owns what is remembered across that. Knows nothing of
what the schedules start.
"""

from __future__ import annotations

from typing import Any

import httpx

from tide.errors import ServiceError


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
    for path in off:
        answer = httpx.patch(f"{api}/{path}", json={"active": True}, timeout=30.0, trust_env=False)
        if answer.is_error:
            raise ServiceError(f"schedule {path} was not turned on again: {answer.status_code} {answer.text[:500]}")
    return len(off)


def _deployments(api: str) -> list[dict[str, Any]]:
    try:
        answer = httpx.post(f"{api}/deployments/filter", json={"limit": 200}, timeout=30.0, trust_env=False)
    except httpx.HTTPError as error:
        raise ServiceError(f"Prefect at {api} does not answer: {error}") from error
    if answer.is_error:
        raise ServiceError(f"Prefect at {api} does not list its deployments: {answer.status_code} {answer.text[:500]}")
    found: list[dict[str, Any]] = answer.json()
    return found
