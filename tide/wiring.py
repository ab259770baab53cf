"""The one place that turns Settings into adapters.

Owns which adapter stands behind which port. Imports adapters when they are asked for, so that a worker without torch
can harvest and one without lakeFS can show --help.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from pydantic import SecretStr, ValidationError

from tide.config import CanaryPolicy, Settings
from tide.engine.base import Engine
from tide.engine.live import Live
from tide.errors import ConfigError, EngineUnavailable, ServiceError
from tide.evaluator.base import Evaluator
from tide.serving.rollout import Restart, Site
from tide.signatures import keys
from tide.signatures.attestation import Authority
from tide.signatures.signing import SigningKey, TrustedKeys
from tide.store.base import Store
from tide.trainer.base import Trainer

if TYPE_CHECKING:
    from tide.canary.watch import CanaryWatch
    from tide.lineage.openlineage import OpenLineage

RESTART_TIMEOUT_S = 300.0


@lru_cache
def settings() -> Settings:
    """Settings of this process, read once. Raises ConfigError that names each variable at fault, never its value."""
    try:
        return Settings()
    except ValidationError as error:
        found = (f"TIDE_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors(include_input=False))
        raise ConfigError(f"{'; '.join(found)}; tide/config.py has every setting") from None


def _plain(secret: SecretStr) -> str:
    """The one place where a secret leaves Settings: on its way into an adapter."""
    return secret.get_secret_value()


def hash_key(config: Settings) -> bytes:
    """The configured key that ids are hashed with; empty when none is set."""
    return _plain(config.hash_key).encode()


def store(config: Settings, *, attempts: int = 6) -> Store:
    """lakeFS at the configured endpoint; what is committed goes to the OpenLineage receiver too, when there is one.

    Args:
        attempts: how often a transient failure is tried in all; 1 for who would rather say now that it is down.
    """
    from tide.store.late_validators import late_validators

    with late_validators():
        from tide.store.lakefs import LakefsStore
        from tide.store.lakefs_erase import BlockAccess
        from tide.store.telling import telling

    blocks = BlockAccess(
        config.lakefs_blocks,
        config.s3_endpoint,
        _plain(config.s3_access_key),
        _plain(config.s3_secret_key),
        config.s3_region,
    )
    lakefs = LakefsStore(
        config.lakefs_endpoint,
        _plain(config.lakefs_access_key),
        _plain(config.lakefs_secret_key),
        config.lakefs_namespace,
        blocks=blocks,
        attempts=attempts,
    )
    return telling(lakefs, openlineage(config).committed) if config.openlineage_url else lakefs


@lru_cache
def openlineage(config: Settings) -> OpenLineage:
    """One a process, so that a receiver that is down is waited for and warned of once."""
    from tide.lineage.openlineage import OpenLineage

    return OpenLineage(
        config.openlineage_url,
        store=config.lakefs_endpoint,
        service=config.service,
        states_repository=config.states_repository,
        api_key=_plain(config.openlineage_api_key),
    )


def engines(config: Settings, *, timeout_s: float = 30.0) -> list[Engine]:
    """One SGLang client a replica.

    Args:
        timeout_s: for every call but a generation and the health check.
    """
    return [engine_at(url, config, name=name, timeout_s=timeout_s) for name, url in config.replica_urls.items()]


def engine_at(url: str, config: Settings, *, name: str, timeout_s: float = 30.0) -> Engine:
    """Client of an SGLang server that takes the service's admin key."""
    from tide.engine.sglang import SglangEngine

    return SglangEngine(url, name=name, admin_key=_plain(config.admin_key), control_timeout_s=timeout_s)


def engines_at(addresses: Sequence[str]) -> list[Engine]:
    """Clients of SGLang servers that are no replicas of the service: nothing that needs a key is asked of them."""
    from tide.engine.sglang import SglangEngine

    return [SglangEngine(address) for address in addresses]


def secrets(config: Settings) -> Mapping[str, str]:
    """Every secret that is set, by its environment variable: what a worker's environment is made of."""
    found = {f"TIDE_{name.upper()}": getattr(config, name) for name in Settings.model_fields}
    return {name: _plain(value) for name, value in found.items() if isinstance(value, SecretStr) and value}


def live(config: Settings, *, timeout_s: float) -> Live:
    """How the figures on each replica's ``/metrics`` are read."""
    from tide.engine.sglang_metrics import read_live

    return {name: partial(read_live, name, url, timeout_s=timeout_s) for name, url in config.replica_urls.items()}


def trainer() -> Trainer:
    """SpecForge."""
    from tide.trainer.specforge import SpecForgeTrainer

    return SpecForgeTrainer()


def evaluator() -> Evaluator:
    """EAGLE3 walks in torch."""
    from tide.evaluator.eagle3 import Eagle3Evaluator

    return Eagle3Evaluator()


def trusted(config: Settings) -> TrustedKeys:
    """Keys whose signatures count. Raises ConfigError when none is set."""
    found = TrustedKeys.parse(config.public_keys)
    if not len(found):
        raise ConfigError("no public key is trusted: set TIDE_PUBLIC_KEYS; `tide init` makes a key and prints it")
    return found


def signing_key(config: Settings) -> SigningKey:
    """The private key of this worker. Raises ConfigError when there is none."""
    if config.signing_key_file is None:
        raise ConfigError(
            "no signing key, and verdicts and promotions are signed: set TIDE_SIGNING_KEY_FILE on the worker that "
            "evaluates and promotes (`tide init` makes the key)"
        )
    return keys.read(config.signing_key_file)


def authority(config: Settings) -> Authority:
    """Who signs here, and whose signatures count."""
    return Authority(signing_key(config), trusted(config))


def site(config: Settings) -> Site:
    """Where a rollout of this service happens."""
    policy = config.policy().canary
    return Site(
        store(config),
        config.drafts_repository,
        engines(config),
        config.drafts,
        restart(config),
        policy,
        canary_watch(config, policy),
    )


def canary_watch(config: Settings, policy: CanaryPolicy) -> CanaryWatch:
    """What looks at a candidate on the first replica, from the spool of this host."""
    from tide.canary.watch import CanaryWatch

    return CanaryWatch(
        spool=config.spool_folder,
        scratch=config.home / "cache" / "canary",  # where an erasure looks too
        draft_dir=config.drafts,
        bundle=config.bundle,
        evaluator=evaluator,
        policy=policy,
    )


def restart(config: Settings) -> Restart | None:
    """The configured restart command as a callable, or None when there is none."""
    if not config.restart_command:
        return None

    def run(replica: Engine, digest: str) -> float:
        started = time.monotonic()
        command = shlex.split(config.restart_command.format(draft=digest, steps=config.policy().draft_steps))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServiceError(f"restart command {command} exited {done.returncode}: {done.stderr[-800:]}")
        _wait_healthy(replica, started + RESTART_TIMEOUT_S)
        return time.monotonic() - started

    return run


def _wait_healthy(replica: Engine, deadline: float) -> None:
    while True:
        try:
            replica.check_health()
        except EngineUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
        else:
            return
