"""Secrets for workers that other people run: Prefect Secret blocks, named by a work pool.

Owns the blocks' names and where they are referred to: in the pool's base job template, which the WORKER resolves when
it starts a run. Never in a deployment: `prefect deploy` resolves a reference there and stores the value in the open,
for everybody who may read deployments. The server keeps blocks encrypted. Spoken to over HTTP, as infra/prefect.py is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import tenacity

from tide.errors import NotFound, ServiceError

_TIMEOUT_S = 30.0
_BUSY = (429, 503)
"""SQLite behind a server is locked for moments; Prefect's own client asks again too."""
_ATTEMPTS = 8


@dataclass(frozen=True)
class PrefectApi:
    """A Prefect server's API, local or not."""

    url: str
    """``http://host:port/api``."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call; the answer's JSON, None when it has none.

        Raises:
            NotFound: no such thing there.
            ServiceError: no answer, or a refusal; never has the body that was sent.
        """
        try:
            answer = self._send(method, path, body)
        except httpx.HTTPError as error:
            raise ServiceError(f"Prefect at {self.url} does not answer: {error}") from error
        if answer.status_code == 404:
            raise NotFound(f"Prefect at {self.url} has no {path}")
        if answer.status_code == 401:
            raise ServiceError(f"Prefect at {self.url} wants a password: set PREFECT_API_AUTH_STRING=NAME:PASSWORD")
        if not answer.is_success:
            # A refusal may repeat what it was sent.
            raise ServiceError(f"Prefect at {self.url} refused {method} {path}: {answer.status_code}")
        return answer.json() if answer.content else None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """The answer, asked for again while the server is busy; every call here may be repeated."""
        patient = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda answer: answer.status_code in _BUSY),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        answer: httpx.Response = patient(
            httpx.request,
            method,
            f"{self.url}/{path}",
            json=body,
            headers=dict(self.headers),
            timeout=_TIMEOUT_S,
            trust_env=False,
        )
        return answer


def block_name(service: str, variable: str) -> str:
    """Name of the block of a variable: ``smollm2-lakefs-secret-key`` for TIDE_LAKEFS_SECRET_KEY."""
    return f"{service}-{variable.removeprefix('TIDE_').lower().replace('_', '-')}"


def push(api: PrefectApi, service: str, pool: str, values: Mapping[str, str]) -> dict[str, str]:
    """Store each value in a block, and make the pool's runs get it in their environment. Safe to repeat.

    Args:
        values: secrets by environment variable.

    Returns:
        The block of each variable.

    Raises:
        NotFound: no such work pool.
        ServiceError: the server refused, or the pool has no job template yet.
    """
    template = _template(api, pool)
    kind = api.call("GET", "block_types/slug/secret")["id"]
    [schema, *_] = api.call(
        "POST", "block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}, "limit": 1}
    )
    names = {variable: block_name(service, variable) for variable in values}
    for variable, name in names.items():
        _store(api, name, {"data": {"value": values[variable]}, "block_schema_id": schema["id"]}, kind)
    environment = template["variables"]["properties"].setdefault("env", {"type": "object"})
    references = {variable: f"{{{{ prefect.blocks.secret.{name} }}}}" for variable, name in names.items()}
    environment["default"] = {**(environment.get("default") or {}), **references}
    api.call("PATCH", f"work_pools/{pool}", {"base_job_template": template})
    return names


def _template(api: PrefectApi, pool: str) -> dict[str, Any]:
    template: dict[str, Any] = api.call("GET", f"work_pools/{pool}")["base_job_template"]
    if "properties" not in template.get("variables", {}):
        raise ServiceError(f"work pool {pool} has no job template yet: start its worker once, then push again")
    return template


def _store(api: PrefectApi, name: str, content: Mapping[str, Any], kind: str) -> None:
    try:
        found = api.call("GET", f"block_types/slug/secret/block_documents/name/{name}")
    except NotFound:
        api.call("POST", "block_documents/", {"name": name, "block_type_id": kind, **content})
    else:
        api.call("PATCH", f"block_documents/{found['id']}", {**content, "merge_existing_data": False})
