"""Signed records: the envelope, and the statement by which a draft may serve."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tide.domain.identity import Digest, Record

KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""First half of the sha256 of a public key's 32 bytes."""

SignedKind = Literal["verdict", "attestation", "approval", "promotion", "rollback", "canary"]


class Signed(Record):
    """A record's canonical JSON with an Ed25519 signature over it and its kind."""

    schema_version: Literal[1] = 1
    kind: SignedKind
    payload: str
    """Exactly the bytes that were signed, as text; JSON, so that a hook and a person can read it."""
    key: KeyId
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Attestation(Record):
    """What the promoter states of a draft that may serve: as which generation, and on whose verdict."""

    schema_version: Literal[1] = 1
    kind: Literal["promotion", "canary", "rollback"]
    generation: int = Field(ge=1)
    draft: Digest
    previous: Digest | None
    verdict: Signed | None
    """The signed verdict; None only for a rollback, to a draft that was promoted before."""
    at: float
    """Seconds since the epoch."""
