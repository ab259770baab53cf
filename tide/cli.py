"""``tide ...``: the command. Starts and stops the local stack, runs flows, shows and changes what serves.

Owns arguments, output and exit codes: 0 done, 1 a TIDE error (its message says what to do), 130 interrupted. The work
is done elsewhere: infra.local starts parts, wiring gives adapters, rollout changes what serves.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from infra import local
from tide import history_text, provenance, rollout, wiring
from tide import pinned as pinning
from tide.errors import EngineError, TideError
from tide.history import serving_at

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Keep a speculative decoder fast on live traffic.")

snapshot_app = typer.Typer(no_args_is_help=True, help="The states commit that experiments are made on.")
app.add_typer(snapshot_app, name="snapshot")

Home = Annotated[Path, typer.Option("--home", envvar="TIDE_HOME", help="Folder of everything local.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DEFAULT_HOME = Path(".tide")


class LineageForm(StrEnum):
    """How `tide lineage` prints."""

    TREE = "tree"
    MERMAID = "mermaid"


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


@app.command()
def up(
    home: Home = DEFAULT_HOME,
    service: Annotated[str, typer.Option(help="Name of the service; its repositories are named after it.")] = "smollm2",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready.")] = False,
) -> None:
    """Start lakeFS, Prefect, SGLang and the workers on free loopback ports, and wait until all are ready."""
    wanted = local.Wanted(service=service)
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


@app.command()
def down(home: Home = DEFAULT_HOME) -> None:
    """End exactly what `tide up` started."""
    ended = local.down(home)
    print(f"ended: {', '.join(ended) if ended else 'nothing was running'}")


@app.command()
def status(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """State, address and memory of every part."""
    parts = local.status(home)
    if as_json:
        print(json.dumps([vars(p) for p in parts]))
        return
    for part in parts:
        memory = f"{part.memory_bytes / 2**20:.0f} MiB" if part.memory_bytes else ""
        print(f"{part.name:<16} {part.state:<8} {part.pid or '':<8} {memory:<10} {part.url}")


@app.command("env")
def environment(home: Home = DEFAULT_HOME) -> None:
    """Print the stack's settings for your shell: eval "$(tide env)"."""
    for name, value in sorted(local.load(home).env.items()):
        print(f"export {name}={shlex.quote(value)}")


@app.command("run")
def run_flow(
    name: Annotated[str, typer.Argument(help="adapt, harvest, train, promote or rollback")],
    parameter: Annotated[list[str] | None, typer.Option("--param", "-p", help="key=value, repeatable")] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Run a deployment on its work pool and follow it until it ends; exit 1 when it did not complete."""
    _use_stack(home)
    flags = [part for value in parameter or [] for part in ("--param", value)]
    prefect = str(Path(sys.executable).with_name("prefect"))
    done = subprocess.run([prefect, "deployment", "run", f"{name}/{name}", "--watch", *flags], check=False)
    raise typer.Exit(done.returncode)


@app.command()
def serving(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """What `serving.json` says, and what each replica really serves."""
    _use_stack(home)
    config = wiring.settings()
    truth = rollout.read_serving(wiring.store(config), config.drafts_repository)
    found = {engine.name: _active(engine) for engine in wiring.engines(config)}
    if as_json:
        print(json.dumps({"serving": truth.model_dump(mode="json"), "replicas": found}))
        return
    print(f"generation {truth.generation}, stable {truth.stable.digest if truth.stable else 'none'}")
    for name, draft in found.items():
        print(f"  {name}: {draft}")


def _active(engine: Any) -> str:
    try:
        return str(engine.active_draft())
    except EngineError as error:
        return f"unreachable: {error}"


@app.command()
def history(
    at: Annotated[str | None, typer.Option(help="What served then: 2026-11-30T09:00 (UTC)")] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """What served when, and why: every generation, or the one at a time."""
    _use_stack(home)
    config = wiring.settings()
    found = provenance.changes(wiring.store(config), config.drafts_repository)
    if at is not None:
        found = [serving_at(found, history_text.parse_moment(at))]
    print(json.dumps([c.model_dump(mode="json") for c in found]) if as_json else history_text.table(found))


@snapshot_app.command("pin")
def pin_snapshot(
    ref: Annotated[str, typer.Argument(help="Branch, tag or commit of the states repository.")] = "main",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Move data/snapshot.lock.json: what `dvc repro` is made on, and the draft it starts from."""
    _use_stack(home)
    config = wiring.settings()
    pinned = pinning.pin(wiring.store(config), config.states_repository, config.drafts_repository, ref)
    parent = f"parent draft {pinned.parent[:12]}" if pinned.parent else "no parent draft"
    print(pinned.to_json() if as_json else f"{pinned.repository}@{pinned.commit[:12]} pinned, {parent}")


@app.command()
def lineage(
    draft: Annotated[str, typer.Argument(help="serving, gen-N, or a digest or its beginning")] = "serving",
    form: Annotated[LineageForm, typer.Option("--format", help="How to print it.")] = LineageForm.TREE,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Where a draft comes from: its training, its verdicts, its states' windows, and its parents."""
    _use_stack(home)
    config = wiring.settings()
    origin = provenance.trace(wiring.store(config), config.drafts_repository, draft)
    render = history_text.mermaid if form is LineageForm.MERMAID else history_text.tree
    print(origin.model_dump_json() if as_json else render(origin))


@app.command()
def rollback(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Put the previous draft back into serving on every replica. Works with Prefect down."""
    _use_stack(home)
    config = wiring.settings()
    promotion = rollout.rollback(
        wiring.store(config),
        config.drafts_repository,
        replicas=wiring.engines(config),
        draft_dir=config.drafts,
        restart=wiring.restart(config),
    )
    done = f"generation {promotion.generation}: draft {promotion.draft} serves again"
    print(promotion.to_json() if as_json else done)


@app.command()
def reconcile(home: Home = DEFAULT_HOME) -> None:
    """Make every replica match `serving.json`."""
    _use_stack(home)
    config = wiring.settings()
    swaps = rollout.reconcile(
        wiring.store(config), config.drafts_repository, replicas=wiring.engines(config), draft_dir=config.drafts
    )
    for swap in swaps:
        print(f"{swap.replica}: {swap.before[:12]} -> {swap.after[:12]} in {swap.seconds:.3f} s")
    if not swaps:
        print("every replica matches serving.json")


@app.command()
def demo(
    home: Home = DEFAULT_HOME,
    fast: Annotated[bool, typer.Option("--fast", help="A shortened cycle; reports no ratios.")] = False,
    before: Annotated[Path | None, typer.Option(help="JSON lines of `messages`: traffic before the shift.")] = None,
    after: Annotated[Path | None, typer.Option(help="JSON lines of `messages`: traffic after the shift.")] = None,
) -> None:
    """The whole cycle on this machine: serve, log, harvest, train, promote, shift, adapt, measure."""
    from tide.demo import setting, story  # pull in plotting, which no other command needs

    options = setting.Options(home=home.absolute() / "demo", fast=fast, before=before, after=after)
    story.tell(options, setting.Local(running=_demo_stack, start_plain_engine=local.start_plain_engine))


def _demo_stack(
    home: Path, engine: Mapping[str, Any], env: Mapping[str, str], report: Callable[[str], None]
) -> AbstractContextManager[local.Stack]:
    return local.running(home, local.Wanted(service="demo", engine=engine, env=env), report=report)


def _use_stack(home: Path) -> None:
    """Settings of the running stack, under what the caller's environment says already."""
    for name, value in local.read_env(home).items():
        os.environ.setdefault(name, value)
    wiring.settings.cache_clear()


if __name__ == "__main__":
    main()
