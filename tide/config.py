"""Policy (what we decide by: versioned, frozen, recorded with every decision) and Settings (where things are).

Owns defaults and their bounds. Knows nothing of adapters; wiring.py turns Settings into them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tide.domain import Record, TrainingConfig
from tide.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class _Finite(Record):
    """YAML knows .inf and .nan; JSON, which digests are taken of, does not."""

    model_config = ConfigDict(allow_inf_nan=False)


class CapturePolicy(_Finite):
    """How logged states are cut into windows, and how many of them are wanted."""

    window_s: int = Field(default=300, ge=1)
    """Length of a harvest window, seconds; a shard belongs to the window of its close time."""
    floor_rate: float = Field(default=0.01, ge=0, le=1)
    """Share of requests whose states are captured while nothing is asked for; counters are kept of all."""
    gather_time_s: float = Field(default=3600.0, gt=0)
    """Seconds in which ``train_tokens`` are to be gathered once the drift gate asks for a draft."""
    byte_budget_per_s: float | None = Field(default=None, gt=0)
    """Bytes of states a second that all replicas together may write; None: no limit."""


class DriftPolicy(_Finite):
    """When the traffic has moved far enough."""

    min_requests: int = Field(default=50, ge=1)
    """Fewer measured requests than this give no verdict."""
    baseline_requests: int = Field(default=500, ge=2)
    """Measured requests after a promotion that are frozen as the baseline, ``warming`` until then. From some 500 on a
    loss of .05 of the rate is told from the baseline's own error; with fewer the slack grows."""
    cusum_slack: float = Field(default=0.25, ge=0)
    """k, in standard deviations of the per-request residual."""
    baseline_errors: float = Field(default=2.5, ge=0)
    """Standard errors of the baseline's own mean that the slack is never below; 0 takes the baseline for exact."""
    cusum_threshold: float = Field(default=25.0, gt=0)
    """h, in standard deviations, at least; higher where streams of the baseline's own requests pass it too often."""
    false_alarm_rate: float = Field(default=0.005, gt=0, lt=1)
    """Share of streams of ``false_alarm_requests`` requests of the baseline that may pass the threshold."""
    false_alarm_requests: int = Field(default=900, ge=1)
    consecutive_windows: int = Field(default=2, ge=1)
    input_js_threshold: float = Field(default=0.1, gt=0, le=1)
    """Jensen-Shannon distance of hashed-token histograms, sampling noise taken off, that counts as moved inputs."""
    length_js_threshold: float = Field(default=0.3, gt=0, le=1)
    """The same for prompt and response lengths in powers of two."""
    script_js_threshold: float = Field(default=0.2, gt=0, le=1)
    """The same for the mix of scripts."""
    pooled_mmd_threshold: float = Field(default=0.15, gt=0, le=1)
    """Square root of MMD^2 of pooled states that counts as moved inputs; 3 in 10 requests of another workload: .15."""
    absent_threshold: float = Field(default=0.1, gt=0, le=1)
    """Rise of the share of requests without counters, token histogram or pooled state that is worth a look."""
    engine_requests: int = Field(default=8, ge=1)
    """Requests both served and walked offline that tell the engine from the traffic; fewer say nothing."""
    bootstrap_tokens: int = Field(default=20_000, ge=1)
    """Training tokens that must be there before a first draft, or a draft in place of an imported one, is trained."""
    growth_factor: float = Field(default=2.0, gt=1)
    """Training tokens since the incumbent was trained, over those it was trained on, that promise headroom."""


class CostPolicy(_Finite):
    """Whether the gain that a retrain promises is worth its cost. Off while ``training_cost`` is not set."""

    training_cost: float | None = Field(default=None, gt=0)
    """Device-seconds of one training run, all its devices together; None: the rule is off."""
    price_ratio: float = Field(default=1.0, gt=0)
    """Price of a second of a training device over that of a second of a serving engine."""
    horizon: float = Field(default=86_400.0, gt=0)
    """Seconds that the new draft is expected to serve the traffic it was made for."""
    recovery: float = Field(default=0.7, gt=0, le=1)
    """Share of the lost acceptance that a retrain brings back, before there is history of our own."""
    added: float = Field(default=0.05, ge=0)
    """Acceptance length that a retrain adds beyond what was lost, by more tokens or by inputs that were new to the
    incumbent, before there is history of our own."""
    prior_weight: float = Field(default=3.0, gt=0)
    """Retrains of history that weigh as much as the two figures above."""

    @property
    def on(self) -> bool:
        """False when nothing is weighed."""
        return self.training_cost is not None


class PromotionPolicy(_Finite):
    """What a candidate must prove on the gate requests."""

    alpha: float = Field(default=0.04, ge=0.001, lt=0.5)
    """One-sided error rate a family; .04 nominal keeps the real one under .05."""
    min_gain: float = Field(default=0.02, ge=0)
    """Acceptance length that the overall lower bound must exceed."""
    slice_margin: float = Field(default=0.05, gt=0)
    """No slice may be worse than this, by its lower bound."""
    slice_margins: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Margins of single slices, by name; a name that no gate request has is an error when the gate decides."""
    context_bounds: tuple[Annotated[int, Field(gt=0)], ...] = (1024, 2048, 8192)
    """Prompt tokens at which one context slice ends and the next begins; none: contexts are not told apart."""
    min_requests: int = Field(default=20, ge=2)
    min_slice_requests: int = Field(default=20, ge=2)
    """Slices with fewer requests are pooled into ``other``."""
    resamples: int = Field(default=4000, ge=200)
    max_verdicts: int = Field(default=10, ge=1, le=20)
    """Verdicts that one gate generation gives."""
    cycle_s: float = Field(default=900.0, gt=0)
    """Seconds between cycles of the schedule, for the false promotions a year that a verdict reports."""
    seed: int = Field(default=0, ge=0)

    @field_validator("context_bounds")
    @classmethod
    def _rising(cls, bounds: tuple[int, ...]) -> tuple[int, ...]:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must rise")
        return bounds


class RetentionPolicy(_Finite):
    """Which windows of states stay on ``main``. With no limit set everything stays."""

    keep_windows: int | None = Field(default=None, ge=1)
    """Newest windows kept."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the newest windows kept, those that a live draft was trained on counted first."""
    lineage_days: int | None = Field(default=None, ge=0)
    """Days since its training that the windows of a draft in serving, or the one before it, are kept whatever the
    limits say; None: as long as it serves or can be rolled back to."""
    collect_after_days: int = Field(default=30, ge=1)
    """Days after which lakeFS's garbage collection may take what left ``main``."""

    @property
    def limited(self) -> bool:
        """False when everything stays."""
        return self.keep_windows is not None or self.max_bytes is not None


class Policy(_Finite):
    """Everything decisions depend on. Its digest stands in every verdict."""

    schema_version: Literal[1] = 1
    capture: CapturePolicy = CapturePolicy()
    drift: DriftPolicy = DriftPolicy()
    cost: CostPolicy = CostPolicy()
    train: TrainingConfig = TrainingConfig()
    promotion: PromotionPolicy = PromotionPolicy()
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
    """Where things are; from the environment, prefix ``TIDE_``, or a ``.env`` file in the working folder."""

    model_config = SettingsConfigDict(env_prefix="TIDE_", env_file=".env", extra="ignore", frozen=True)

    service: str = Field(default="smollm2", pattern=r"^[a-z0-9][a-z0-9-]{1,40}$")
    home: Path = Path(".tide")
    """Folder of everything local: models, spool, drafts, run files."""
    policy_file: Path | None = None
    lakefs_endpoint: str = "http://127.0.0.1:8000"
    lakefs_access_key: str = ""
    lakefs_secret_key: str = ""
    lakefs_namespace: str = "local://"
    lakefs_blocks: Path | None = None
    """Folder of a local block store (``blockstore.local.path`` of lakeFS); set where bytes may be deleted."""
    s3_endpoint: str = ""
    """S3-compatible store that lakeFS keeps its blocks in, when bytes must be deleted there; empty: AWS's own."""
    s3_access_key: str = ""
    s3_secret_key: str = Field(default="", repr=False)
    s3_region: str = ""
    hash_key: str = Field(default="", repr=False)
    """Key of the hashes of requests and conversations, as the replicas have it; unset: the one kept with the spool."""
    replicas: str = "r0=http://127.0.0.1:30000"
    """Comma-separated ``name=url`` of the serving replicas."""
    admin_key: str = ""
    """Admin key of the replicas' swap route."""
    spool: Path | None = None
    draft_dir: Path | None = None
    target_bundle: Path | None = None
    """Head-only target; ``tide up`` makes it under ``home``, a training worker gets it shipped."""
    public_keys: str = ""
    """Comma-separated Ed25519 public keys (64 hexadecimal digits) whose signatures count; `tide init` prints one."""
    signing_key_file: Path | None = None
    """Private key of the worker that evaluates and promotes; harvest and training workers never have it."""
    openlineage_url: str = ""
    """Where lineage events go, ``http://host:port`` or ``file:///path``; empty: nowhere. Extra ``openlineage``."""
    openlineage_api_key: str = ""
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
        if not pairs or any(not name or not url.startswith("http") for name, _, url in pairs):
            raise ConfigError(f"TIDE_REPLICAS is {self.replicas!r}; expected name=http://host:port[,name=url...]")
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
