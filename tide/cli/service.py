"""Commands that show what serves and where it comes from, and that change it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from tide import pinned as pinning
from tide import repositories, wiring
from tide.cli.approvals import require_approval
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack
from tide.domain import CanaryRefusal, ReplicaSwap
from tide.errors import EngineError
from tide.lineage import history_text, provenance
from tide.lineage.history import serving_at
from tide.serving import rollout
from tide.serving.replicas import describe
from tide.signatures import keys
from tide.watching import doctor as checks
from tide.watching import doctor_prefect as prefect_checks

commands = typer.Typer()
snapshot = typer.Typer(no_args_is_help=True, help="The states commit that experiments are made on.")


class LineageForm(StrEnum):
    """How `tide lineage` prints."""

    TREE = "tree"
    MERMAID = "mermaid"


@commands.command()
def init(home: Home = DEFAULT_HOME) -> None:
    """Make the signing key and the service's two repositories, their main guarded; harmless to repeat."""
    config = use_stack(home)
    path = config.signing_key_file or keys.ensure(config.home)[0]
    key = keys.read(path)
    print(f"signing key: {path}, for the worker that evaluates and promotes: TIDE_SIGNING_KEY_FILE={path}")
    print(f"public key, for workers and engines: TIDE_PUBLIC_KEYS={key.public}")
    store = wiring.store(config)
    repositories.mend(store, config.states_repository)
    print(f"{config.states_repository}: main takes merges only")
    repositories.mend_drafts(store, config.drafts_repository)
    print(f"{config.drafts_repository}: main takes merges only, and only those with an attestation")


@commands.command()
def doctor(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Check settings, repositories, serving.json, replicas and Prefect; exit 1 when something is wrong."""
    config = use_stack(home)
    found = checks.examine(config, wiring.store(config), wiring.engines(config))
    found += prefect_checks.of_environment()
    if as_json:
        print(json.dumps([check.model_dump(mode="json") for check in found]))
    else:
        for check in found:
            print(f"{check.state:<8} {check.name}: {check.detail}{f'  -> {check.fix}' if check.fix else ''}")
    raise typer.Exit(int(any(check.state not in ("ok", "note") for check in found)))


@commands.command()
def serving(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """What `serving.json` says, and what each replica really serves."""
    config = use_stack(home)
    truth = rollout.read_serving(wiring.store(config), config.drafts_repository)
    found = {engine.name: _active(engine) for engine in wiring.engines(config)}
    if as_json:
        print(json.dumps({"serving": truth.model_dump(mode="json"), "replicas": found}))
        return
    print(f"generation {truth.generation}, stable {truth.stable.digest if truth.stable else 'none'}")
    if truth.canary:
        print(f"  on trial: {truth.canary.draft} on {', '.join(truth.canary.replicas)}, by {truth.canary.run}")
    for name, draft in found.items():
        print(f"  {name}: {draft}")


def _active(engine: Any) -> str:
    try:
        return str(engine.active_draft())
    except EngineError as error:
        return f"unreachable: {error}"


@commands.command()
def history(
    at: Annotated[str | None, typer.Option(help="What served then: 2026-11-30T09:00 (UTC)")] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """What served when, and why: every generation, or the one at a time."""
    config = use_stack(home)
    found = provenance.changes(wiring.store(config), config.drafts_repository)
    if at is not None:
        found = [serving_at(found, history_text.parse_moment(at))]
    print(json.dumps([c.model_dump(mode="json") for c in found]) if as_json else history_text.table(found))


@snapshot.command("pin")
def pin_snapshot(
    ref: Annotated[str, typer.Argument(help="Branch, tag or commit of the states repository.")] = "main",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Move data/snapshot.lock.json: what `dvc repro` is made on, and the draft it starts from."""
    config = use_stack(home)
    pinned = pinning.pin(wiring.store(config), config.states_repository, config.drafts_repository, ref)
    parent = f"parent draft {pinned.parent[:12]}" if pinned.parent else "no parent draft"
    print(pinned.to_json() if as_json else f"{pinned.repository}@{pinned.commit[:12]} pinned, {parent}")


@commands.command()
def lineage(
    draft: Annotated[str, typer.Argument(help="serving, gen-N, or a digest or its beginning")] = "serving",
    form: Annotated[LineageForm, typer.Option("--format", help="How to print it.")] = LineageForm.TREE,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Where a draft comes from: its training, its verdicts, its states' windows, and its parents."""
    config = use_stack(home)
    origin = provenance.trace(wiring.store(config), config.drafts_repository, draft)
    render = history_text.mermaid if form is LineageForm.MERMAID else history_text.tree
    print(origin.model_dump_json() if as_json else render(origin))


@commands.command()
def reproduce(
    draft: Annotated[str, typer.Argument(help="serving, gen-N, or a digest or its beginning")] = "serving",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Train a draft again from its lineage and compare digests; exit 1 when they differ, naming what does."""
    from tide import reproduce as making

    config = use_stack(home)
    store = wiring.store(config)
    found = making.reproduce(
        store,
        config.drafts_repository,
        provenance.trace(store, config.drafts_repository, draft).draft,
        trainer=wiring.trainer(),
        bundle=config.bundle,
        scratch=config.home / "train",
        on_progress=lambda p: typer.echo(f"step {p.step}/{p.total_steps}", err=True),
    )
    if as_json:
        print(found.model_dump_json())
    else:
        print(f"draft {found.draft[:12]}: {'the same weights again' if found.same else 'other weights'}")
        for difference in found.differences:
            print(f"  {difference}")
    raise typer.Exit(int(not found.same))


@commands.command("rollout")
def roll_out(
    branch: Annotated[str, typer.Argument(help="Branch of the drafts repository with a candidate and its verdict.")],
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Put a candidate with a signed `promote` verdict into serving. Works with Prefect down; resumes a killed one.

    Exit 1 when the canary refused it: the incumbent serves.
    """
    config = use_stack(home)
    require_approval(config, branch)
    outcome = rollout.resume(wiring.site(config), wiring.authority(config), branch)
    if as_json:
        print(outcome.to_json())
    elif isinstance(outcome, CanaryRefusal):
        reasons = "; ".join(outcome.report.reasons)
        print(f"refused by the canary ({outcome.report.outcome}): {reasons}; {outcome.previous or 'no draft'} serves")
        _print_replicas(outcome.replicas)
    else:
        print(f"generation {outcome.generation}: draft {outcome.draft} serves")
        _print_replicas(outcome.replicas)
    raise typer.Exit(int(isinstance(outcome, CanaryRefusal)))


@commands.command()
def rollback(
    to: Annotated[
        str | None, typer.Option(help="gen-N, or a promoted draft's digest or its beginning; else the previous draft.")
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="The generation to leave; with it, running this twice goes back once.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Put a draft that was promoted before back into serving on every replica. Works with Prefect down."""
    config = use_stack(home)
    promotion = rollout.rollback(wiring.site(config), wiring.authority(config), expected_generation=generation, to=to)
    if as_json:
        print(promotion.to_json())
        return
    print(f"generation {promotion.generation}: draft {promotion.draft} serves again")
    _print_replicas(promotion.replicas)


def _print_replicas(swaps: Sequence[ReplicaSwap]) -> None:
    for swap in swaps:
        print(f"  {describe(swap)}")


@commands.command()
def reconcile(home: Home = DEFAULT_HOME) -> None:
    """Make every replica match `serving.json`, if the promoter signed for it; exit 1 when one is out of service."""
    config = use_stack(home)
    signer = wiring.authority(config) if config.signing_key_file else wiring.trusted(config)
    swaps = rollout.reconcile(wiring.site(config), signer)
    for swap in swaps:
        print(describe(swap))
    if not swaps:
        print("every replica matches serving.json")
    raise typer.Exit(int(any(swap.out_of_service for swap in swaps)))
