"""The one place that turns Settings into adapters.

Owns which adapter stands behind which port. Imports adapters when they are asked for, so that a worker without torch
can harvest and one without lakeFS can show --help.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from functools import lru_cache

from tide.config import Settings
from tide.engine.base import Engine
from tide.errors import EngineUnavailable, ServiceError
from tide.evaluator.base import Evaluator
from tide.rollout import Restart
from tide.store.base import Store
from tide.trainer.base import Trainer

RESTART_TIMEOUT_S = 300.0


@lru_cache
def settings() -> Settings:
    """Settings of this process, read once."""
    return Settings()


def store(config: Settings) -> Store:
    """lakeFS at the configured endpoint."""
    from tide.store.late_validators import late_validators

    with late_validators():
        from tide.store.lakefs import LakefsStore

    return LakefsStore(
        config.lakefs_endpoint, config.lakefs_access_key, config.lakefs_secret_key, config.lakefs_namespace
    )


def engines(config: Settings) -> list[Engine]:
    """One SGLang client a replica."""
    from tide.engine.sglang import SglangEngine

    return [SglangEngine(url, name=name, admin_key=config.admin_key) for name, url in config.replica_urls.items()]


def trainer() -> Trainer:
    """SpecForge."""
    from tide.trainer.specforge import SpecForgeTrainer

    return SpecForgeTrainer()


def evaluator() -> Evaluator:
    """EAGLE3 walks in torch."""
    from tide.evaluator.eagle3 import Eagle3Evaluator

    return Eagle3Evaluator()


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
