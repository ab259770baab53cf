"""One SGLang server on the CPUs of this machine: its arguments, its environment, its readiness.

Owns what a CPU needs to serve with an EAGLE3 draft, and how the plugin inside is told where spool and drafts are. Knows
nothing of what is captured, or of which draft is right.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from infra import ports, processes
from infra.files import write_private
from infra.processes import ManagedProcess, Report
from tide.errors import ConfigError

NAME = "sglang"


class SglangOptions(BaseModel):
    """What decides a server. Kept with the stack, so that a restart changes only what it means to change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """Folder of the target model."""
    port: int
    draft: Path | None = None
    """Folder of the draft model; needed when speculative."""
    untrained: bool = False
    """The draft is a placeholder that counts as none."""
    speculative: bool = True
    steps: int = Field(default=3, ge=0)
    """Draft steps; 0 serves without drafting while the tap runs."""
    topk: int = Field(default=1, ge=1)
    draft_tokens: int = Field(default=4, ge=1)
    """Tokens verified in one step, the newest known token included."""
    admin_key: str = Field(default="", repr=False)
    """Without it the server has no admin routes."""
    spool: Path | None = None
    """Where the plugin writes shards; None: no capture."""
    draft_dir: Path | None = None
    """Where the plugin finds drafts by digest; None: no swap."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int = Field(default=1, ge=1)
    """OpenMP threads. More than the idle cores collapse to a tenth of the speed."""
    max_total_tokens: int = Field(default=16384, ge=1024)
    max_running_requests: int = Field(default=32, ge=1)
    plugin_env: dict[str, str] = Field(default_factory=dict)
    """Further settings of the plugin and the engine, as environment variables."""
    extra_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.speculative and self.draft is None:
            raise ValueError("speculative serving needs a draft")
        return self

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{ports.HOST}:{self.port}"

    def check_folders(self) -> None:
        """Raises ConfigError when the target or the draft is not a folder in Hugging Face format."""
        for what, folder in (("target model", self.model), ("draft model", self.draft)):
            if folder is not None and not (folder / "config.json").is_file():
                raise ConfigError(f"{what} {folder} has no config.json; give a folder in Hugging Face format")

    def argv(self, secrets_file: Path | None = None) -> list[str]:
        """Command line. The admin key goes by ``secrets_file``: arguments can be read by every user of the machine."""
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu"),
            *("--host", ports.HOST, "--port", str(self.port), "--dtype", self.dtype),
            *("--mem-fraction-static", "0.2", "--max-total-tokens", str(self.max_total_tokens)),
            *("--max-running-requests", str(self.max_running_requests)),
            # Without it an idle scheduler burns a core.
            *("--sleep-on-idle", "--enable-metrics"),
            *(self._speculative_argv() if self.speculative else ()),
            *self.extra_args,
            *(("--config", str(secrets_file)) if secrets_file else ()),
        ]

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """Whole environment of the server: the base without anything of TIDE or Prefect, and what it needs.

        A draft folder or a run id inherited by accident would switch the plugin on, or tie the server to a flow run.
        """
        kept = {k: v for k, v in base.items() if not k.startswith(("TIDE_", "PREFECT_", "SGLANG_", "LAKEFS_"))}
        threads = str(self.threads)
        engine = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        folders = {"TIDE_SPOOL_DIR": self.spool, "TIDE_DRAFT_DIR": self.draft_dir}
        plugin = {name: str(folder) for name, folder in folders.items() if folder is not None}
        if self.untrained:
            plugin["TIDE_DRAFT_UNTRAINED"] = "1"
        return ports.without_proxy(kept) | engine | plugin | self.plugin_env

    def _speculative_argv(self) -> tuple[str, ...]:
        return (
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(self.draft)),
            *("--speculative-num-steps", str(self.steps), "--speculative-eagle-topk", str(self.topk)),
            *("--speculative-num-draft-tokens", str(self.draft_tokens)),
        )


def launch(home: Path, options: SglangOptions, *, name: str = NAME, die_with_parent: bool = False) -> ManagedProcess:
    """Start the server without waiting for it.

    Raises:
        ConfigError: the target or the draft folder is missing.
        ServiceError: the port is busy, or a server of that name runs.
    """
    options.check_folders()
    ports.require_port(name, options.port)
    secrets_file = None
    if options.admin_key:
        secrets_file = home.absolute() / "run" / f"{name}.secrets.yaml"
        write_private(secrets_file, yaml.safe_dump({"admin-api-key": options.admin_key}))
    return processes.start(
        home, name, options.argv(secrets_file), env=options.env(os.environ), cwd=home, die_with_parent=die_with_parent
    )


def wait_ready(
    process: ManagedProcess, options: SglangOptions, report: Report = lambda _: None, *, timeout_s: float = 600.0
) -> float:
    """Wait until the server answers its health route; 20 s on an idle machine, 90 s on a busy one. Returns seconds.

    Raises:
        ServiceError: it ended, or was not healthy in time; the message has the end of its log.
    """

    def healthy() -> bool:
        return ports.http_ok(f"{options.url}/health") and process.listens(options.port)

    return process.wait_ready(healthy, timeout_s, report, poll_s=0.5)
