"""The command that measures an engine.

Owns how engines are named and where a profile goes. The work is that of tide.throughput.profiling.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from infra import local
from tide import wiring
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack
from tide.config import Settings
from tide.domain import EngineProfile
from tide.engine.base import Engine
from tide.errors import ConfigError
from tide.files import write_durably
from tide.throughput import profiles, profiling
from tide.throughput.step_times import Plan

commands = typer.Typer()
FILE = "profile.json"


@commands.command()
def profile(
    plain: Annotated[
        str | None, typer.Option(help="Address of an engine without speculation; one of this stack is started if none.")
    ] = None,
    speculative: Annotated[
        list[str] | None,
        typer.Option(help="Address of an engine that serves a draft; repeatable, with other draft steps each. [r0]"),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, by rising numbers.")] = "1,2,4,8",
    repeats: Annotated[int, typer.Option(help="Measurements of each figure, of which the median is taken.")] = 5,
    machine: Annotated[str, typer.Option(help="What the engines run on, for the record.")] = "",
    out: Annotated[Path | None, typer.Option(help="File to write; profile.json in the home otherwise.")] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Measure what a step costs with and without speculation, and record it for the verdicts; takes some minutes.

    The engines should have no other traffic meanwhile. With one speculative engine the profile holds for its number of
    draft steps alone; a second one with other steps tells drafting from verification.
    """
    config = use_stack(home)
    plan = _plan(concurrency, repeats)
    ours = _engines(config, speculative)
    with nullcontext(plain) if plain else local.plain_engine(home, _say) as address:
        (baseline,) = wiring.engines_at([address])
        found = profiling.measure(baseline, ours, plan, machine=machine, report=_say)
    path = out or config.home / FILE
    write_durably(path, found.to_json().encode())
    place = profiles.keep(wiring.store(config), config.drafts_repository, found)
    _say(f"{path}, and {place} on the ledger of {config.drafts_repository}")
    print(found.to_json() if as_json else _text(found))


def _engines(config: Settings, addresses: list[str] | None) -> list[Engine]:
    return wiring.engines_at(addresses) if addresses else wiring.engines(config)[:1]


def _plan(concurrency: str, repeats: int) -> Plan:
    try:
        return Plan(concurrency=tuple(int(part) for part in concurrency.split(",")), repeats=repeats)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{'.'.join(map(str, first['loc'])) or 'concurrency'}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"--concurrency {concurrency}: give numbers with commas between them, as 1,2,4,8") from error


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _text(found: EngineProfile) -> str:
    bound = f"holds for {found.steps} draft steps alone" if found.steps is not None else "holds for any draft steps"
    head = f"{found.engine}: {bound}\nrequests  plain ms  verify ms  draft step ms"
    times = [(p.concurrency, 1e3 * p.plain_step_s, 1e3 * p.verify_step_s, 1e3 * p.draft_step_s) for p in found.points]
    rows = [f"{b:>8}  {plain:>8.2f}  {verify:>9.2f}  {draft:>13.2f}" for b, plain, verify, draft in times]
    request, token = 1e3 * found.prefill_request_s, 1e3 * found.prefill_token_s
    added, each = 1e3 * found.draft_prefill_request_s, 1e3 * found.draft_prefill_token_s
    prefill = f"prefill {request:.1f} ms and {token:.2f} ms a token; the draft adds {added:.1f} and {each:.2f} ms"
    return "\n".join([head, *rows, prefill])
