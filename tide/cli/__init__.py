"""``tide ...``: the command.

Owns arguments, output and exit codes: 0 done, 1 a TIDE error (its message says what to do), 130 interrupted. The work
is done elsewhere: infra.local starts parts, tide.wiring gives adapters, tide.serving changes what serves.
"""

from __future__ import annotations

import sys

import typer

from tide.cli import approvals, data, engine, metrics, pools, secrets, service, stack, status
from tide.errors import TideError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Keep a speculative decoder fast on live traffic.",
    pretty_exceptions_show_locals=False,  # local variables hold keys
)
app.add_typer(stack.commands)
app.add_typer(status.commands)
app.add_typer(metrics.commands)
app.add_typer(service.commands)
app.add_typer(approvals.commands)
app.add_typer(data.commands)
app.add_typer(engine.commands)
app.add_typer(pools.commands)
app.add_typer(service.snapshot, name="snapshot")
app.add_typer(secrets.commands, name="secrets")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except TideError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
