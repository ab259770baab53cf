"""A lakeFS that somebody else runs: is it there, does it take our keys, and may our repositories lie where we say.

Owns these checks alone. Starts and ends nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tide.config import Settings
from tide.errors import ConfigError, StoreUnauthorized, StoreUnavailable

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LakefsAccess:
    """How a lakeFS server is reached."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    namespace: str
    """Where new repositories keep their bytes, such as ``s3://bucket/prefix/``."""
    blocks: Path | None = None
    """Folder of the blocks, where this machine has them."""


def existing_lakefs(endpoint: str) -> LakefsAccess:
    """The server at an address, with keys and namespace from the environment (TIDE_LAKEFS_*) or ``.env``; checked.

    Args:
        endpoint: ``http://host:port``.

    Raises:
        ConfigError: no http address, no keys, or a namespace that the server's block store cannot have.
        StoreUnavailable: no lakeFS answers there.
        StoreUnauthorized: it refuses the keys.
    """
    endpoint = endpoint.rstrip("/")
    if not re.fullmatch(r"https?://[^/]+", endpoint):
        raise ConfigError(f"{endpoint!r} is no address of a lakeFS server; expected http://host:port")
    settings = Settings()
    if not (settings.lakefs_access_key and settings.lakefs_secret_key):
        raise ConfigError(
            f"there are no keys for lakeFS at {endpoint}: set TIDE_LAKEFS_ACCESS_KEY and TIDE_LAKEFS_SECRET_KEY"
        )
    keys = (settings.lakefs_access_key.get_secret_value(), settings.lakefs_secret_key.get_secret_value())
    found = LakefsAccess(endpoint, *keys, settings.lakefs_namespace)
    _check_namespace(found, _storage(found))
    return found


def _storage(server: LakefsAccess) -> dict[str, Any]:
    try:
        answer = httpx.get(
            f"{server.endpoint}/api/v1/config",
            auth=(server.access_key, server.secret_key),
            timeout=TIMEOUT_S,
            trust_env=False,  # the store's own client heeds no proxy either
        )
        if answer.status_code in (401, 403):
            raise StoreUnauthorized(
                f"lakeFS at {server.endpoint} refuses the keys (HTTP {answer.status_code}): check "
                "TIDE_LAKEFS_ACCESS_KEY and TIDE_LAKEFS_SECRET_KEY"
            )
        return dict(answer.raise_for_status().json()["storage_config"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise StoreUnavailable(
            f"no lakeFS answers at {server.endpoint} ({error}): is it running, is the address right?"
        ) from error


def _check_namespace(server: LakefsAccess, storage: dict[str, Any]) -> None:
    pattern = storage.get("blockstore_namespace_ValidityRegex", "")
    if not re.match(pattern, server.namespace) or not server.namespace.endswith("/"):
        raise ConfigError(
            f"TIDE_LAKEFS_NAMESPACE is {server.namespace!r}, but lakeFS at {server.endpoint} keeps its bytes in "
            f"{storage.get('blockstore_type')}: set it to something like "
            f"{storage.get('blockstore_namespace_example')} with a / at the end"
        )
