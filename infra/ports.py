"""Loopback ports and plain HTTP readiness checks. Knows nothing of the services behind them."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Mapping

import httpx
import psutil

from tide.errors import ServiceError

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """True when the loopback port can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A loopback port that was free a moment ago, below those that Linux gives to outgoing connections.

    A server that ends and is started again on it will not find it taken by somebody's client, and two processes that
    ask at once are given different ones, almost always.
    """
    while not is_free(port := random.SystemRandom().randrange(20_000, 32_000)):
        pass
    return port


def choose_port(service: str, wanted: int | None, usual: int, taken: frozenset[int] = frozenset()) -> int:
    """The wanted port, which must be free; else the usual one if free and not ``taken``; else any.

    Raises:
        ServiceError: the wanted port is busy; names the service, the port and, where it can be read, its holder.
    """
    if wanted is not None:
        require_port(service, wanted)
        return wanted
    port = usual
    while port in taken or not is_free(port):
        port = free_port()
    return port


def wait_free(port: int, timeout_s: float) -> None:
    """Wait until a port that its owner gave up can be bound: closing connections may hold it for a moment."""
    deadline = time.monotonic() + timeout_s
    while not is_free(port) and time.monotonic() < deadline:
        time.sleep(0.2)


def require_port(service: str, port: int) -> None:
    """Raises ServiceError when the port is busy."""
    if not is_free(port):
        raise ServiceError(f"port {port} for {service} is in use{_holder(port)}; stop that, or give another port")


def http_ok(url: str, timeout_s: float = 2.0) -> bool:
    """True when the address answers 200. Proxies of the environment are not for the loopback."""
    try:
        return httpx.get(url, timeout=timeout_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """The environment, with the loopback exempt from any proxy."""
    listed = [part for part in env.get("NO_PROXY", env.get("no_proxy", "")).split(",") if part]
    exempt = ",".join(dict.fromkeys([*listed, HOST, "localhost"]))
    return {**env, "NO_PROXY": exempt, "no_proxy": exempt}


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if not address or connection.status != psutil.CONN_LISTEN or connection.pid is None:
                continue
            if address.port == port:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
