"""`tide status`: one screen of the service, once, or redrawn until Ctrl-C.

Owns the terminal: colours, redrawing, exit codes. What is shown is watching.status's, how it is worded status_text's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live as Screen
from rich.text import Text

from infra import local
from tide import wiring
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack
from tide.config import Settings
from tide.watching import status as gathering
from tide.watching import status_text
from tide.watching.status import Part, Sources, Status

commands = typer.Typer()
TIMEOUT_S = 2.0
"""For one replica to answer: a screen shows what is there, it does not wait for what is not."""
EVERY_S = 5.0
_STYLES = {"title": "bold", "plain": "", "good": "green", "warn": "yellow", "bad": "bold red", "dim": "dim"}


@commands.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until Ctrl-C.")] = False,
    seconds: Annotated[
        float, typer.Argument(metavar="[SECONDS]", help="Between two redraws, with --watch.", min=0.5)
    ] = EVERY_S,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """What serves and where, acceptance, the last cycle and why, what waits for a person, spool, parts.

    Exit code 1 when nothing of the service could be read; what could not be read is named in its place.
    """
    config = use_stack(home)
    sources = sources_of(config)

    def read() -> Status:
        parts = [Part.model_validate(vars(part)) for part in local.status(home)]
        return gathering.gather(sources, parts, time.time())

    if watch:
        _watch(read, seconds, as_json=as_json)
        return
    found = read()
    _show(found, as_json=as_json)
    raise typer.Exit(int(found.blind))


def sources_of(config: Settings, *, timeout_s: float = TIMEOUT_S) -> Sources:
    """Where a service is read from; nothing is asked yet, and nothing is ever told to a lineage receiver."""
    return Sources(
        service=config.service,
        store=wiring.store(config.model_copy(update={"openlineage_url": ""}), attempts=1),
        repository=config.drafts_repository,
        replicas=wiring.engines(config, timeout_s=timeout_s),
        live=wiring.live(config, timeout_s=timeout_s),
        spool=config.spool_folder,
        window_s=lambda: config.policy().capture.window_s,
    )


def _show(found: Status, *, as_json: bool) -> None:
    if as_json:
        print(found.model_dump_json(), flush=True)
    elif sys.stdout.isatty():
        Console().print(_styled(found), soft_wrap=True)
    else:
        print(status_text.plain(found), flush=True)


def _styled(found: Status) -> Text:
    return Text("\n").join(Text(line.text, style=_STYLES[line.tone]) for line in status_text.lines(found))


def _watch(read: Callable[[], Status], seconds: float, *, as_json: bool) -> None:
    """Redraw in place on a terminal, else one screen (or one line of JSON) after another. Ctrl-C is a good end."""
    try:
        if as_json or not sys.stdout.isatty():
            while True:
                _show(read(), as_json=as_json)
                time.sleep(seconds)
        with Screen(_styled(read()), screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(seconds)
                screen.update(_styled(read()), refresh=True)
    except KeyboardInterrupt:
        return
