"""Secrets for workers that other people run: Prefect Secret blocks, named by a work pool.

Owns the blocks' names and where they are referred to: in the pool's base job template, which the WORKER resolves when
it starts a run. Never in a deployment: `prefect deploy` resolves a reference there and stores the value in the open,
for everybody who may read deployments. The server keeps blocks encrypted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tide.errors import NotThere, ServiceError
from tide.prefect_api import PrefectApi


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
        NotThere: no such work pool.
        ServiceError: the server refused, or the pool has no job template yet.
        ConfigError: it wants a password, or another one.
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
    api.call("PATCH", f"work_pools/{pool}", {"base_job_template": template}, secret=True)
    return names


def _template(api: PrefectApi, pool: str) -> dict[str, Any]:
    template: dict[str, Any] = api.call("GET", f"work_pools/{pool}")["base_job_template"]
    if "properties" not in template.get("variables", {}):
        raise ServiceError(f"work pool {pool} has no job template yet: start its worker once, then push again")
    return template


def _store(api: PrefectApi, name: str, content: Mapping[str, Any], kind: str) -> None:
    try:
        found = api.call("GET", f"block_types/slug/secret/block_documents/name/{name}")
    except NotThere:
        api.call("POST", "block_documents/", {"name": name, "block_type_id": kind, **content}, secret=True)
    else:
        api.call("PATCH", f"block_documents/{found['id']}", {**content, "merge_existing_data": False}, secret=True)
