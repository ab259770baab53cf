"""Policy (what we decide by: versioned, frozen, recorded with every decision) and Settings (where things are).

Owns how both are read; the policy's groups are in ``policies``. Knows nothing of adapters, which wiring.py makes of
Settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tide.domain import TrainingConfig
from tide.errors import ConfigError
from tide.names import is_plain
from tide.policies import (
    ApprovalPolicy,
    CanaryPolicy,
    CapturePolicy,
    CostPolicy,
    DriftPolicy,
    FiniteRecord,
    PromotionPolicy,
    RetentionPolicy,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "ApprovalPolicy",
    "CanaryPolicy",
    "CapturePolicy",
    "CostPolicy",
    "DriftPolicy",
    "Policy",
    "PromotionPolicy",
    "RetentionPolicy",
    "Settings",
]

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class Policy(FiniteRecord):
    """Everything decisions depend on. Its digest stands in every verdict."""

    schema_version: Literal[1] = 1
    capture: CapturePolicy = CapturePolicy()
    drift: DriftPolicy = DriftPolicy()
    cost: CostPolicy = CostPolicy()
    train: TrainingConfig = TrainingConfig()
    promotion: PromotionPolicy = PromotionPolicy()
    approval: ApprovalPolicy = ApprovalPolicy()
    canary: CanaryPolicy = CanaryPolicy()
    train_tokens: int = Field(default=2_000_000, ge=1)
    """Newest training rows taken for a run."""
    replay_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run's rows taken from older windows."""
    draft_steps: int = Field(default=3, ge=1, le=16)
    """Draft steps of a verify step that a first draft is judged at, and then served with."""
    gate_requests: int = Field(default=200, ge=1)
    """Newest gate requests that a verdict is made on: the gate generation."""
    selection_requests: int = Field(default=100, ge=1)
    """Newest selection requests that checkpoints, and drafts that served before, are compared on."""
    pool_drafts: int = Field(default=4, ge=0)
    """Drafts that served before, newest first, that are tried before one is trained; 0: none."""
    parent_tolerance: float = Field(default=0.01, gt=0)
    """How far a parent's walk may be from the acceptance length in its record before training refuses it, relative."""
    offline_live_tolerance: float = Field(default=0.02, gt=0)
    retention: RetentionPolicy = RetentionPolicy()

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a YAML file of parameters; what it does not name has its default.

        Raises:
            ConfigError: it cannot be read; or names file, parameter, value and what is allowed.
        """
        try:
            content = yaml.safe_load(path.read_bytes())
            return cls.model_validate({} if content is None else content)
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist: restore it (an empty file stands for the defaults)") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}: {'; '.join(map(_explain, error.errors()))}; correct it there") from error


def _explain(error: ErrorDetails) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{where} is no parameter (tide/config.py has all of them)"
    given = repr(error["input"])[:_SHOWN]
    return f"{where} is {given}: {error['msg']}" if where else f"it holds {given}: expected names with values"


class Settings(BaseSettings):
    """Where things are; from the environment, prefix ``TIDE_``, or a ``.env`` file in the working folder.

    A secret shows as asterisks wherever settings are printed, logged or serialised; wiring.py alone takes it out.
    """

    model_config = SettingsConfigDict(
        env_prefix="TIDE_", env_file=".env", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    service: str = Field(default="smollm2", pattern=r"^[a-z0-9][a-z0-9-]{1,40}$")
    home: Path = Path(".tide")
    """Folder of everything local: models, spool, drafts, run files."""
    policy_file: Path | None = None
    lakefs_endpoint: str = "http://127.0.0.1:8000"
    lakefs_access_key: SecretStr = SecretStr("")
    lakefs_secret_key: SecretStr = SecretStr("")
    lakefs_namespace: str = "local://"
    lakefs_blocks: Path | None = None
    """Folder of a local block store (``blockstore.local.path`` of lakeFS); set where bytes may be deleted."""
    s3_endpoint: str = ""
    """S3-compatible store that lakeFS keeps its blocks in, when bytes must be deleted there; empty: AWS's own."""
    s3_access_key: SecretStr = SecretStr("")
    s3_secret_key: SecretStr = SecretStr("")
    s3_region: str = ""
    hash_key: SecretStr = SecretStr("")
    """Key of the hashes of requests and conversations, as the replicas have it; unset: the one kept with the spool."""
    replicas: str = "r0=http://127.0.0.1:30000"
    """Comma-separated ``name=url`` of the serving replicas."""
    admin_key: SecretStr = SecretStr("")
    """Admin key of the replicas' swap route."""
    spool: Path | None = None
    spool_quota_bytes: int = Field(default=20 << 30, ge=1 << 20)
    """What the replicas' plugin lets the spool hold, under the same variable; alerts are raised before it is full."""
    draft_dir: Path | None = None
    target_bundle: Path | None = None
    """Head-only target; ``tide up`` makes it under ``home``, a training worker gets it shipped."""
    public_keys: str = ""
    """Comma-separated Ed25519 public keys (64 hexadecimal digits) whose signatures count; `tide init` prints one."""
    signing_key_file: Path | None = None
    """Private key of the worker that evaluates and promotes; harvest and training workers never have it."""
    openlineage_url: str = ""
    """Where lineage events go, ``http://host:port`` or ``file:///path``; empty: nowhere. Extra ``openlineage``."""
    openlineage_api_key: SecretStr = SecretStr("")
    restart_command: str = ""
    """Command that restarts a replica when a hot swap cannot do: before the first draft.

    ``{draft}`` stands for the draft's digest, ``{steps}`` for ``draft_steps`` of the policy.
    """

    @field_validator("signing_key_file", "policy_file", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value  # a deployment's template gives an empty string for an unset variable

    @property
    def bundle(self) -> Path:
        """Folder of the head-only target bundle."""
        return self.target_bundle or self.home / "bundle"

    @property
    def drafts(self) -> Path:
        """DRAFT_DIR of the replica on this host."""
        return self.draft_dir or self.home / "drafts"

    @property
    def spool_folder(self) -> Path:
        """Spool of the replica on this host."""
        return self.spool or self.home / "spool"

    @property
    def replica_urls(self) -> dict[str, str]:
        """Replicas by name. Raises ConfigError when ``TIDE_REPLICAS`` is malformed."""
        pairs = [part.strip().partition("=") for part in self.replicas.split(",") if part.strip()]
        if not pairs or any(not is_plain(name) or not url.startswith("http") for name, _, url in pairs):
            raise ConfigError(
                f"TIDE_REPLICAS is {self.replicas!r}; expected name=http://host:port[,name=url...], a name being "
                "letters, digits, '.', '_' and '-': it becomes part of paths"
            )
        return {name: url for name, _, url in pairs}

    @property
    def states_repository(self) -> str:
        """lakeFS repository of captured states."""
        return f"{self.service}-states"

    @property
    def drafts_repository(self) -> str:
        """lakeFS repository of drafts, verdicts and ``serving.json``."""
        return f"{self.service}-drafts"

    def policy(self) -> Policy:
        """The policy file's content, or the defaults when none is set."""
        return Policy.load(self.policy_file) if self.policy_file else Policy()
