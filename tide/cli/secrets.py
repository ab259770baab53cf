"""`tide secrets`: how workers on other machines get theirs, without anybody reading them.

Owns which secrets are handed over. How Prefect keeps them is in infra.secret_blocks.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from infra import prefect_access, secret_blocks
from tide import wiring
from tide.cli.common import DEFAULT_HOME, Home, use_stack
from tide.errors import ConfigError

commands = typer.Typer(no_args_is_help=True, help="Secrets of workers, kept by Prefect.")


@commands.callback()
def _group() -> None:
    """Secrets of workers, kept by Prefect."""


@commands.command("push")
def push_secrets(
    pool: Annotated[str, typer.Option(help="Work pool whose runs get them.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Variable, such as TIDE_LAKEFS_SECRET_KEY; repeatable. [all that are set]")
    ] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Keep this shell's secrets in Prefect Secret blocks, from which the runs of a work pool get them; repeatable.

    A training pool needs the two keys of lakeFS alone: name them by --only. The signing key is a file of the host that
    signs, and never goes this way.
    """
    config = use_stack(home)
    known = wiring.secrets(config)
    if missing := [name for name in only or () if name not in known]:
        raise ConfigError(f"{', '.join(missing)}: not set here, or no secret of TIDE; set are {', '.join(known)}")
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise ConfigError("PREFECT_API_URL is not set: the address of your Prefect server, http://host:port/api")
    api = prefect_access.server_at(url)
    values = {name: value for name, value in known.items() if not only or name in only}
    for variable, block in secret_blocks.push(api, config.service, pool, values).items():
        print(f"{variable}: block secret/{block}, read by the workers of pool {pool}")
