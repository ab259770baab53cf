"""`tide metrics`: the pipeline's metrics for Prometheus, on a loopback port.

Owns the exporter's process: where it listens and how it ends. What is exported is in tide.watching.metrics.
"""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry, start_http_server

from infra import ports
from tide.cli.common import DEFAULT_HOME, Home, use_stack
from tide.cli.status import sources_of
from tide.watching.metrics import PipelineCollector

commands = typer.Typer()
PORT = 9477
TIMEOUT_S = 3.0
"""For one replica to answer within a scrape, whose own limit is 10 s."""


@commands.command()
def metrics(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Loopback port to listen on.")] = PORT,
    home: Home = DEFAULT_HOME,
) -> None:
    """Serve the pipeline's metrics to Prometheus until Ctrl-C; infra/watching has its configuration, alerts, dashboard.

    Run it on the serving host, whose spool it measures. It reads only, and needs no signing key.
    """
    config = use_stack(home)
    ports.require_port("metrics", port)
    registry = CollectorRegistry()
    registry.register(PipelineCollector(sources_of(config, timeout_s=TIMEOUT_S), quota_bytes=config.spool_quota_bytes))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server, thread = start_http_server(port, addr=ports.HOST, registry=registry)
    print(f"metrics: http://{ports.HOST}:{port}/metrics", flush=True)
    ended.wait()
    server.shutdown()
    thread.join()
