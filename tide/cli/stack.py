"""Commands that start and stop the local stack, and run flows and the demo on it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from infra import local, ports
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack

commands = typer.Typer()


@commands.command()
def up(
    home: Home = DEFAULT_HOME,
    service: Annotated[
        str | None,
        typer.Option(help="Its repositories are named after it; the one this home had before, or smollm2."),
    ] = None,
    lakefs: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Use the lakeFS that runs there; keys and namespace from TIDE_LAKEFS_*."),
    ] = None,
    prefect_host: Annotated[
        str, typer.Option(help="Where Prefect listens; 0.0.0.0 needs PREFECT_SERVER_API_AUTH_STRING=NAME:PASSWORD.")
    ] = ports.HOST,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready.")] = False,
) -> None:
    """Start lakeFS, Prefect, SGLang and the workers on free loopback ports, and wait until all are ready."""
    wanted = local.Wanted(service=service, lakefs=lakefs, prefect_host=prefect_host)
    if detach:
        _welcome(local.up(home, wanted))
        return
    with local.running(home, wanted) as stack:
        _welcome(stack)
        print("Ctrl-C ends everything that was started here.")
        local.watch(home)


def _welcome(stack: local.Stack) -> None:
    for name, url in stack.urls.items():
        print(f"  {name:<14} {url}")
    print("  lakeFS keys    TIDE_LAKEFS_ACCESS_KEY and _SECRET_KEY of `tide env`")
    print('Run a cycle:     tide run adapt      (or: eval "$(tide env)"; prefect deployment run adapt/adapt)')


@commands.command()
def down(home: Home = DEFAULT_HOME) -> None:
    """End exactly what `tide up` started."""
    ended = local.down(home)
    print(f"ended: {', '.join(ended) if ended else 'nothing was running'}")


@commands.command()
def parts(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """State, address and memory of every part of the local stack."""
    found = local.status(home)
    if as_json:
        print(json.dumps([vars(p) for p in found]))
        return
    for part in found:
        memory = f"{part.memory_bytes / 2**20:.0f} MiB" if part.memory_bytes else ""
        print(f"{part.name:<16} {part.state:<8} {part.pid or '':<8} {memory:<10} {part.url}")


@commands.command("env")
def environment(home: Home = DEFAULT_HOME) -> None:
    """Print the stack's settings for your shell: eval "$(tide env)"."""
    for name, value in sorted(local.load(home).env.items()):
        print(f"export {name}={shlex.quote(value)}")


@commands.command("run")
def run_flow(
    name: Annotated[str, typer.Argument(help="adapt, harvest, train, promote, rollback, reconcile or retain")],
    parameter: Annotated[list[str] | None, typer.Option("--param", "-p", help="key=value, repeatable")] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Run a deployment on its work pool and follow it until it ends; exit 1 when it did not complete."""
    use_stack(home)
    flags = [part for value in parameter or [] for part in ("--param", value)]
    prefect = str(Path(sys.executable).with_name("prefect"))
    done = subprocess.run([prefect, "deployment", "run", f"{name}/{name}", "--watch", *flags], check=False)
    raise typer.Exit(done.returncode)


@commands.command()
def demo(
    home: Home = DEFAULT_HOME,
    fast: Annotated[bool, typer.Option("--fast", help="A shortened cycle; reports no ratios.")] = False,
    before: Annotated[Path | None, typer.Option(help="JSON lines of `messages`: traffic before the shift.")] = None,
    after: Annotated[Path | None, typer.Option(help="JSON lines of `messages`: traffic after the shift.")] = None,
) -> None:
    """The whole cycle on this machine: serve, log, harvest, train, promote, shift, adapt, measure."""
    from tide.demo import setting, story  # pull in plotting, which no other command needs

    options = setting.Options(home=home.absolute() / "demo", fast=fast, before=before, after=after)
    story.tell(options, setting.Local(_demo_stack, local.start_plain_engine, local.end_pipeline))


def _demo_stack(
    home: Path, engine: Mapping[str, Any], env: Mapping[str, str], report: Callable[[str], None]
) -> AbstractContextManager[local.Stack]:
    return local.running(home, local.Wanted(service="demo", engine=engine, env=env), report=report)
