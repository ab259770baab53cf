"""The start of a stack: in which order, what beside what, and what each part is told of the others.

Owns the settings that a stack runs with. Cleans nothing up: whoever starts ends what was started when it fails.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import ports, prefect, prefect_access, processes, sglang
from infra.cpu import serving_dtype
from infra.lakefs.build import LAKEFS
from infra.lakefs.existing import LakefsAccess, existing_lakefs
from infra.lakefs.server import USUAL_PORT as LAKEFS_PORT
from infra.lakefs.server import LakefsServer
from infra.prepared import PREPARED_FILE, Prepared
from infra.processes import ManagedProcess, Report
from infra.sglang import SglangOptions
from infra.stack import Stack, save
from tide.errors import ServiceError
from tide.names import is_digest
from tide.signatures import keys

REPLICA = "r0"
USUAL_SERVICE = "smollm2"
PREPARE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Wanted:
    """What a stack is asked to be. A port that is None is the usual one when free, else any."""

    service: str | None = None
    """Name of the service; None: the one that this home had before, or ``smollm2``."""
    lakefs: str | None = None
    """Address of a lakeFS that runs already, in place of one of our own; its keys come from the environment."""
    lakefs_port: int | None = None
    prefect_port: int | None = None
    prefect_host: str = ports.HOST
    """Where Prefect listens: loopback, or 0.0.0.0 with a password (``prefect_access``)."""
    engine_port: int | None = None
    draft: Path | None = None
    """Draft to serve at first; None: the one marked as serving, else an untrained one."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SglangOptions that differ from the defaults."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further settings for ``tide`` and the workers, such as TIDE_POLICY_FILE."""
    prefect_file: Path = prefect.PREFECT_FILE


@dataclass(frozen=True)
class Start:
    """One start of one stack. ``foreground``: the kernel ends every part when the calling process dies."""

    home: Path
    wanted: Wanted
    report: Report
    foreground: bool

    def run(self) -> Stack:
        """Start every part and wait until all are ready.

        Slow parts start side by side: the Prefect server while the models are made, the workers while SGLang loads.

        Raises:
            ServiceError, ConfigError: a part could not be started; others may run.
        """
        wanted = self.wanted
        prefect_access.require_closed(wanted.prefect_host, os.environ)
        lakefs = self._lakefs()
        prefect_port = ports.choose_port("Prefect", wanted.prefect_port, 4200)
        engine_port = ports.choose_port("SGLang", wanted.engine_port, 30000)
        server = prefect.launch_server(
            self.home, prefect_port, host=wanted.prefect_host, die_with_parent=self.foreground
        )
        access = lakefs()
        prepared = self._prepare()
        options = self._engine_options(prepared, engine_port)
        env = self._settings(access, prepared, options) | {"PREFECT_API_URL": prefect.api_url(prefect_port)}
        env |= prefect_access.client_settings(os.environ)
        stack = Stack(self.home, {**env, **wanted.env}, options)
        save(stack)
        engine = sglang.launch(self.home, options, die_with_parent=self.foreground)
        self._start_flows(stack, server, prefect_port)
        sglang.wait_ready(engine, options, self.report)
        self.report(f"SGLang: {options.url}")
        return stack

    def _lakefs(self) -> Callable[[], LakefsAccess]:
        """What starts lakeFS; one that somebody else runs is checked now, before anything of ours is started."""
        if self.wanted.lakefs is not None:
            access = existing_lakefs(self.wanted.lakefs)
            self.report(f"lakeFS: {access.endpoint}, not started here")
            return lambda: access
        server = LakefsServer(
            self.home,
            port=ports.choose_port("lakeFS", self.wanted.lakefs_port, LAKEFS_PORT),
            binary=LAKEFS.binary(say=self.report),
            die_with_parent=self.foreground,
            report=self.report,
        )

        def started() -> LakefsAccess:
            server.start()
            keys = server.credentials
            return LakefsAccess(server.endpoint, keys.access_key, keys.secret_key, "local://", server.blocks)

        return started

    @property
    def _dtype(self) -> str:
        return str(self.wanted.engine.get("dtype") or serving_dtype())

    def _prepare(self) -> Prepared:
        argv = [sys.executable, "-m", "infra.prepare", "--home", str(self.home), "--dtype", self._dtype]
        root = Path(__file__).resolve().parent.parent
        process = processes.start(self.home, "prepare", argv, cwd=root, die_with_parent=self.foreground)
        process.wait_exit(PREPARE_TIMEOUT_S, self.report)
        process.stop()
        return Prepared.model_validate_json((self.home / PREPARED_FILE).read_bytes())

    def _engine_options(self, prepared: Prepared, port: int) -> SglangOptions:
        drafts, spool = self.home / "drafts", self.home / "spool"
        for folder in (spool, drafts):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self.wanted.draft or marked_draft(drafts)
        _, key = keys.ensure(self.home)
        # A public key given by the caller's options stands: a service's own.
        plugin = {"TIDE_PUBLIC_KEYS": key.public, **self.wanted.engine.get("plugin_env", {})}
        usual = {
            "model": prepared.model,
            "dtype": self._dtype,
            "port": port,
            "draft": draft or prepared.draft,
            "untrained": draft is None,
            "admin_key": secrets.token_urlsafe(24),
            "spool": spool,
            "draft_dir": drafts,
        }
        return SglangOptions.model_validate({**usual, **self.wanted.engine, "plugin_env": plugin})

    def _settings(self, lakefs: LakefsAccess, prepared: Prepared, engine: SglangOptions) -> dict[str, str]:
        signing, key = keys.ensure(self.home)
        restart = shlex.join([sys.executable, "-m", "infra.local", "restart-engine", "--home", str(self.home)])
        return {
            "TIDE_SERVICE": self._service(),
            "TIDE_HOME": str(self.home),
            "TIDE_LAKEFS_ENDPOINT": lakefs.endpoint,
            "TIDE_LAKEFS_ACCESS_KEY": lakefs.access_key,
            "TIDE_LAKEFS_SECRET_KEY": lakefs.secret_key,
            "TIDE_LAKEFS_NAMESPACE": lakefs.namespace,
            **({} if lakefs.blocks is None else {"TIDE_LAKEFS_BLOCKS": str(lakefs.blocks)}),
            "TIDE_REPLICAS": f"{REPLICA}={engine.url}",
            "TIDE_ADMIN_KEY": engine.admin_key,
            "TIDE_SPOOL": str(engine.spool),
            "TIDE_DRAFT_DIR": str(engine.draft_dir),
            "TIDE_PUBLIC_KEYS": key.public,
            "TIDE_SIGNING_KEY_FILE": str(signing),
            "TIDE_TARGET_BUNDLE": str(prepared.bundle),
            "TIDE_RESTART_COMMAND": f"{restart} --steps {{steps}} --draft {{draft}}",
        }

    def _service(self) -> str:
        """Remembered with the home: under another name the store that is there would look empty."""
        file = self.home / "service"
        name = self.wanted.service or (file.read_text().strip() if file.is_file() else USUAL_SERVICE)
        file.write_text(f"{name}\n")
        return name

    def _start_flows(self, stack: Stack, server: ManagedProcess, port: int) -> None:
        env = {**os.environ, **stack.env}
        prefect.wait_server(server, port, self.report)
        self.report(f"Prefect: {stack.urls[prefect.SERVER]}")
        prefect.create_pools(port)
        # The key's path goes to the deployments that sign, by prefect.yaml: no other flow is told of it.
        told = {name: value for name, value in env.items() if name != "TIDE_SIGNING_KEY_FILE"}
        workers = {
            pool: prefect.launch_worker(self.home, port, pool, told, die_with_parent=self.foreground)
            for pool in prefect.POOLS
        }
        prefect.deploy(self.home, port, env, self.wanted.prefect_file)
        prefect.automate(port)
        for pool, worker in workers.items():
            prefect.wait_worker(worker, port, pool, self.report)
        self.report(f"work pools: {', '.join(workers)}")


def marked_draft(drafts: Path) -> Path | None:
    """Folder of the draft that the last promotion marked; None before the first one."""
    try:
        digest = (drafts / "serving").read_text().strip()
    except FileNotFoundError:
        return None
    if not is_digest(digest) or not (drafts / digest / "config.json").is_file():
        raise ServiceError(f"{drafts / 'serving'} names draft {digest[:80]!r}, which is not in {drafts}: put it back")
    return drafts / digest
