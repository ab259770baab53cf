"""Calls of the Prefect API over HTTP: the address, the password where there is one, and what a refusal says.

Importing Prefect's own client would freeze its settings too early. Knows nothing of what is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx

from infra.prefect_access import auth_string
from tide.errors import ServiceError


def client(api: str) -> httpx.Client:
    """A client of a server; its address with ``/api``."""
    name, _, password = auth_string(os.environ).partition(":")
    auth = (name, password) if name else None
    return httpx.Client(base_url=api.rstrip("/") + "/", timeout=30.0, trust_env=False, auth=auth)


def ask(connection: httpx.Client, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """One call; what it answers, None when it answers nothing.

    Raises:
        ServiceError: no answer, or a refusal; has what the server said.
    """
    try:
        answer = connection.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ServiceError(f"Prefect at {connection.base_url} does not answer: {error}") from error
    if answer.is_error:
        raise ServiceError(f"Prefect refused {method} {path}: {answer.status_code} {answer.text[:500]}")
    return answer.json() if answer.content else None
