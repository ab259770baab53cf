"""The command that looks at a training worker.

Owns where its question comes from (policy, states and bundle) and how the findings are printed. The checks are those of
the train flow's first stage.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tide import wiring
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack
from tide.config import Settings
from tide.domain import TargetContract
from tide.errors import StoreError
from tide.models.target_files import bundle_contract
from tide.states import snapshots
from tide.trainer.base import Finding

commands = typer.Typer()


@commands.command()
def preflight(
    rehearse: Annotated[
        bool | None,
        typer.Option(
            "--rehearse/--no-rehearse",
            help="Train three steps on made-up rows, on two ranks at least; [with a GPU or several ranks]",
        ),
    ] = None,
    states: Annotated[str, typer.Option(help="States commit or branch that would be trained on.")] = "main",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Can this worker train? Devices, driver, disk, memory, bundle, and a rehearsal; exit 1 when something is wrong."""
    config = use_stack(home)
    policy = config.policy()
    asked = _states(config, states)
    target, rows = (bundle_contract(config.bundle), policy.train_tokens) if isinstance(asked, Finding) else asked
    found = wiring.trainer().preflight(
        policy.train,
        target=target,
        tokens=min(rows, policy.train_tokens),
        parent=None,
        bundle=config.bundle,
        workdir=config.home / "train",
        rehearse=rehearse,
    )
    findings = [*([asked] if isinstance(asked, Finding) else []), *found.findings]
    if as_json:
        print(json.dumps([finding.model_dump() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.state:<8} {finding.name:<14} {finding.detail}")
            if finding.fix:
                print(f"{'':<23} -> {finding.fix}")
    raise typer.Exit(1 if found.wrong else 0)


def _states(config: Settings, ref: str) -> tuple[TargetContract, int] | Finding:
    """Target and rows of the states; a finding when the store does not say, as on a worker that was just set up."""
    try:
        snapshot = snapshots.describe(wiring.store(config), config.states_repository, ref)
    except StoreError as error:
        fix = "set TIDE_LAKEFS_ENDPOINT and its keys; the bundle is looked at by itself, disk for a whole run"
        return Finding(name="states", state="unknown", detail=str(error), fix=fix)
    return snapshot.target, snapshot.rows
