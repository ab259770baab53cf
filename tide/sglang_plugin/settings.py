"""Settings of the plugin: read once from the environment and validated before the engine starts.

Owns names, defaults and bounds. Knows nothing of SGLang. The plugin is inert when neither TIDE_SPOOL_DIR nor
TIDE_DRAFT_DIR is set. Other TIDE_* variables belong to the control plane and are left alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from tide.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
HASH_KEY_FILE = "hash.key"
"""In the spool folder: the key that ids are hashed with, where TIDE_HASH_KEY is not set."""


class PluginSettings(BaseModel):
    """What the plugin does inside the engine. A field ``x_y`` is the environment variable ``TIDE_X_Y``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spool_dir: Path | None = None
    """Where shards and request tables go; unset: no capture."""
    draft_dir: Path | None = None
    """Where drafts to swap in are found by digest; unset: no swap."""
    draft_untrained: bool = False
    """The draft that the engine starts with counts as none: it was never trained."""
    public_keys: str = ""
    """Comma-separated Ed25519 public keys; set: a draft serves only with an attestation signed by one of them."""
    sample_rate: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of requests whose states are captured; counters are kept of all of them."""
    prompt_rows: int = Field(default=256, ge=1)
    """Prompt rows kept before the answer of a training conversation; held-out ones keep all."""
    min_tokens: int = Field(default=2, ge=2)
    """Shorter requests (prompt + answer, tokens) leave no states."""
    max_tokens: int = Field(default=32768, ge=2)
    """Longer prompts leave no states; an answer that grows past it is dropped."""
    spool_quota_bytes: int = Field(default=20 * GIB, ge=MIB)
    """Bytes the spool may hold; beyond it shards are dropped and counted until harvest has made room."""
    shard_bytes: int = Field(default=64 * MIB, ge=4096)
    """A shard is closed once its rows reach this size."""
    shard_age_s: float = Field(default=60.0, gt=0)
    """A shard, and a piece of the request table, is closed at this age."""
    host_bytes: int = Field(default=1 * GIB, ge=4096)
    """Rows of unfinished requests held in host memory."""
    stage_bytes: int = Field(default=32 * MIB, ge=4096)
    """On a GPU: size of each of 3 stages there, and of each of 6 pinned host slots; the rows of one step must fit."""
    queue_bytes: int = Field(default=512 * MIB, ge=4096)
    """Rows waiting for, or held by, the writer thread."""
    idle_evict_s: float = Field(default=600.0, gt=0)
    """Rows of a request that had no forward pass for so long are dropped."""
    hash_key: SecretStr = SecretStr("")
    """Key of the hashes of requests and conversations; unset: kept in a 0600 file beside the spool, made once."""

    @field_validator("spool_dir", "draft_dir")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.shard_bytes > self.queue_bytes:
            raise ValueError(f"shard_bytes {self.shard_bytes} is above queue_bytes {self.queue_bytes}")
        return self

    @property
    def active(self) -> bool:
        """True when the plugin has something to do."""
        return self.spool_dir is not None or self.draft_dir is not None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read ``TIDE_*``; empty values count as unset.

        Raises:
            ConfigError: names the variable, what it holds and what is allowed.
        """
        source = os.environ if environment is None else environment
        values = {n: source[f"TIDE_{n.upper()}"] for n in cls.model_fields if source.get(f"TIDE_{n.upper()}")}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(e) for e in error.errors())) from error

    def prepare(self) -> None:
        """Make the folders, and prove that they can be written.

        Raises:
            ConfigError: a folder cannot be made or written.
        """
        if self.spool_dir is not None:
            for name in ("train", "held_out", "requests"):
                _make_writable(self.spool_dir / name, "TIDE_SPOOL_DIR")
        if self.draft_dir is not None:
            _make_writable(self.draft_dir, "TIDE_DRAFT_DIR")

    def key(self) -> bytes:
        """Key for hashes of requests and conversations: TIDE_HASH_KEY, else a random one kept with the spool.

        Splits are made of conversation hashes, so the key must outlive the process.

        Raises:
            ConfigError: no TIDE_HASH_KEY and no spool, or the key file cannot be used.
        """
        if self.hash_key:
            return self.hash_key.get_secret_value().encode()
        if self.spool_dir is None:
            raise ConfigError("TIDE_HASH_KEY is unset and there is no TIDE_SPOOL_DIR to keep a key in")
        return _stored_key(self.spool_dir / HASH_KEY_FILE)


def _explain(error: object) -> str:
    assert isinstance(error, dict)
    where, given = error["loc"], error.get("input")
    if not where:
        return f"TIDE settings: {error['msg']}"
    return f"TIDE_{str(where[0]).upper()}={given!r}: {error['msg']}"


def _make_writable(folder: Path, variable: str) -> None:
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{variable}: {folder} cannot be written: {error.strerror}; give a writable folder"
        ) from error


def _stored_key(path: Path) -> bytes:
    """The key in the file; made first when missing. A race between ranks is settled by link(), which never replaces."""
    try:
        if not path.exists():
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        key = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"hash key {path}: {error}; set TIDE_HASH_KEY or make the folder writable") from error
    if len(key) < 32:
        raise ConfigError(f"hash key {path} is too short: delete it (hashes start anew) or set TIDE_HASH_KEY")
    return key.encode()
