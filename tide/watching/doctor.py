"""`tide doctor`: is everything as it should be, and if not, what to do.

Reads only. Each check stands alone: one that cannot be made says so and the others go on. Works over ports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tide import repositories
from tide.config import Settings
from tide.engine.base import Engine
from tide.errors import NotFound
from tide.repositories import MAIN
from tide.serving import rollout
from tide.serving.serving_file import read_attestation
from tide.signatures import keys
from tide.signatures.signing import TrustedKeys
from tide.store.base import Commit, Store
from tide.watching.findings import Check, guarded

BY_HAND = 20
"""Newest commits made by hand that are named; more than that are counted."""


def examine(config: Settings, store: Store, replicas: Sequence[Engine]) -> list[Check]:
    """Every check, in the order in which to mend what they find."""
    checks = [
        *guarded("policy", lambda: _policy(config)),
        *guarded("target bundle", lambda: _bundle(config.bundle)),
    ]
    for repository in (config.states_repository, config.drafts_repository):
        checks += guarded(f"repository {repository}", lambda name=repository: _repository(store, name))  # type: ignore[misc]
    checks += guarded("guard", lambda: _guarded(store, config.drafts_repository))
    checks += guarded("keys", lambda: _keys(config))
    checks += guarded("serving.json", lambda: _serving(config, store))
    checks += guarded("canary", lambda: _canary(config, store))
    for replica in replicas:
        name = f"replica {replica.name}"
        checks += guarded(name, lambda r=replica: _replica(store, config.drafts_repository, r))  # type: ignore[misc]
    return checks


def _policy(config: Settings) -> Iterator[Check]:
    digest = config.policy().digest()
    where = str(config.policy_file) if config.policy_file else "the defaults (TIDE_POLICY_FILE is not set)"
    yield Check(name="policy", state="ok", detail=f"{where}, digest {digest[:12]}")


def _bundle(folder: Path) -> Iterator[Check]:
    if (folder / "contract.json").is_file():
        yield Check(name="target bundle", state="ok", detail=str(folder))
    else:
        fix = "`tide up` makes it; on a worker of its own, ship it and set TIDE_TARGET_BUNDLE"
        yield Check(name="target bundle", state="wrong", detail=f"none at {folder}", fix=fix)


def _repository(store: Store, repository: str) -> Iterator[Check]:
    name = f"repository {repository}"
    try:
        patterns = store.protected(repository)
    except NotFound:
        yield Check(name=name, state="wrong", detail="does not exist", fix="`tide init` makes it")
        return
    if MAIN in patterns:
        yield Check(name=name, state="ok", detail="main takes merges only")
    else:
        yield Check(name=name, state="wrong", detail="main takes direct writes", fix="`tide init` protects it")
    by_hand = [commit for commit in store.log(repository, MAIN) if _made_by_hand(commit)]
    for commit in by_hand[:BY_HAND]:
        detail = f"commit {commit.id[:12]} on main carries no lineage: {commit.message!r}"
        yield Check(name=name, state="wrong", detail=detail, fix="look at what it changed: `lakectl diff`")
    if len(by_hand) > BY_HAND:
        detail = f"and {len(by_hand) - BY_HAND} more commits made by hand"
        yield Check(name=name, state="wrong", detail=detail, fix="look at main's log in lakeFS")


def _made_by_hand(commit: Commit) -> bool:
    """The first commit of a repository is lakeFS's own; TIDE's own carry metadata."""
    return bool(commit.parents) and not any(key.startswith("tide.") for key in commit.metadata)


def _guarded(store: Store, repository: str) -> Iterator[Check]:
    if repositories.guarded(store, repository):
        yield Check(name="guard", state="ok", detail=f"{repository}: a hook refuses merges without an attestation")
    elif repository in store.repositories():
        detail = f"{repository}@{MAIN} has no {repositories.GUARD}, or an older one"
        yield Check(name="guard", state="wrong", detail=detail, fix="`tide init` installs it")


def _keys(config: Settings) -> Iterator[Check]:
    trusted = TrustedKeys.parse(config.public_keys)
    if not len(trusted):
        detail = "TIDE_PUBLIC_KEYS is not set: nothing can be promoted or reconciled"
        yield Check(name="keys", state="wrong", detail=detail, fix="`tide init` makes a key and prints what to set")
        return
    if config.signing_key_file is None:
        yield Check(name="keys", state="ok", detail=f"{len(trusted)} trusted; this host signs nothing")
        return
    if keys.read(config.signing_key_file).public in trusted.public:
        yield Check(name="keys", state="ok", detail=f"{len(trusted)} trusted, {config.signing_key_file} among them")
    else:
        detail = f"{config.signing_key_file} signs, but TIDE_PUBLIC_KEYS does not trust it"
        yield Check(name="keys", state="wrong", detail=detail, fix="add its public key; `tide init` prints it")


def _serving(config: Settings, store: Store) -> Iterator[Check]:
    repository = config.drafts_repository
    serving = rollout.read_serving(store, repository)
    if serving.stable is None:
        yield Check(name="serving.json", state="ok", detail="nothing was promoted yet")
        return
    rollout.read_draft(store, repository, MAIN, serving.stable.digest)
    read_attestation(store, repository, TrustedKeys.parse(config.public_keys))
    detail = f"generation {serving.generation}, draft {serving.stable.digest[:12]}"
    yield Check(name="serving.json", state="ok", detail=detail)


def _canary(config: Settings, store: Store) -> Iterator[Check]:
    serving = rollout.read_serving(store, config.drafts_repository)
    if serving.canary and serving.canary.lease_until < time.time():
        detail = (
            f"draft {serving.canary.draft[:12]} is on trial on {', '.join(serving.canary.replicas)}, its lease is over"
        )
        yield Check(name="canary", state="wrong", detail=detail, fix="`tide reconcile` ends it with the incumbent")


def _replica(store: Store, repository: str, replica: Engine) -> Iterator[Check]:
    name, active = f"replica {replica.name}", replica.active_draft()
    serving = rollout.read_serving(store, repository)
    wanted = serving.stable.digest if serving.stable else rollout.NO_DRAFT
    if serving.canary and replica.name in serving.canary.replicas and active == serving.canary.draft:
        yield Check(name=name, state="ok", detail=f"serves {active[:12]} on trial, for {serving.canary.run}")
    elif active == wanted:
        yield Check(name=name, state="ok", detail=f"serves {active[:12]}")
    else:
        detail = f"serves {active[:12]}, serving.json says {wanted[:12]}"
        yield Check(name=name, state="wrong", detail=detail, fix="`tide reconcile`")
