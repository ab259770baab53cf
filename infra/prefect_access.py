"""Who may use the Prefect API: anybody of this machine on loopback, whoever has the password anywhere else.

Owns the settings that are the server's alone (its password, its database), the one for whoever calls it, and the rule
that a server which others can reach is never left open: its API starts flows, and flows hold the keys of the store.
Starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from infra import ports
from tide.errors import ConfigError
from tide.prefect_api import PrefectApi

SERVER_AUTH, CLIENT_AUTH = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
_DATABASE = "PREFECT_SERVER_DATABASE_"
"""Prefect's own settings, ``..._CONNECTION_URL`` first; without them SQLite in the server's folder."""
EVERYWHERE = "0.0.0.0"
LOOPBACK = (ports.HOST,)
_SHORTEST = 12


def require_closed(host: str, env: Mapping[str, str]) -> None:
    """Check that a server on this host would not be open to others.

    Raises:
        ConfigError: it would be, or its password is no password; or the host is none that local workers reach.
    """
    if host in LOOPBACK:
        return
    if host != EVERYWHERE:
        raise ConfigError(
            f"Prefect cannot listen on {host}: this machine's workers reach it by {ports.HOST}; use {EVERYWHERE} and "
            "let a firewall say who else may"
        )
    if not (secret := auth_string(env)):
        raise ConfigError(
            f"Prefect on {host} without a password would let everybody run flows and approve drafts: set "
            f"{SERVER_AUTH}=NAME:PASSWORD for `tide up`, and {CLIENT_AUTH} to the same for workers on other machines"
        )
    name, _, password = secret.partition(":")
    if not name or len(password) < _SHORTEST:
        raise ConfigError(f"{SERVER_AUTH} must be NAME:PASSWORD, the password of {_SHORTEST} characters or more")


def auth_string(env: Mapping[str, str]) -> str:
    """``NAME:PASSWORD`` that an environment has for the API; empty when none."""
    return env.get(SERVER_AUTH) or env.get(CLIENT_AUTH) or ""


def server_at(api: str) -> PrefectApi:
    """The server at an address with ``/api``, with the password of this environment."""
    return PrefectApi(api, auth_string(os.environ))


def client_settings(env: Mapping[str, str]) -> dict[str, str]:
    """What a worker, a flow or Prefect's command needs to call the API."""
    return {CLIENT_AUTH: secret} if (secret := auth_string(env)) else {}


def server_settings(host: str, env: Mapping[str, str]) -> dict[str, str]:
    """What the server alone needs: password, database, and for others' browsers an address that is theirs as well."""
    found = {name: value for name, value in env.items() if name.startswith(_DATABASE)}
    if secret := auth_string(env):
        found[SERVER_AUTH] = secret
    return found if host in LOOPBACK else found | {"PREFECT_UI_API_URL": "/api"}
