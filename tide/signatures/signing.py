"""Ed25519 signatures over records: who decided, provable without the decider.

Owns the signed bytes: the pre-authentication encoding of DSSE v1 (https://github.com/secure-systems-lab/dsse), which
keeps a signature on one kind of record from passing for another. Pure: keys are arguments. Knows nothing of where keys
lie or of what the records allow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Self, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import ValidationError

from tide.domain import Record, Signed, SignedKind
from tide.errors import ConfigError, SignatureRefused

R = TypeVar("R", bound=Record)


class SigningKey:
    """A private key. Only the worker that evaluates and promotes has one, and the person who rolls back by hand."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> Self:
        """A new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> Self:
        """Raises ConfigError when it is no Ed25519 key in unencrypted PKCS#8 PEM."""
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"no private key in PEM: {error}; `tide init` makes one") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"an Ed25519 key is needed, this is {type(key).__name__}; `tide init` makes one")
        return cls(key)

    def pem(self) -> bytes:
        """Unencrypted PKCS#8 PEM."""
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public(self) -> str:
        """The public key: 64 hexadecimal digits."""
        return _raw(self._private.public_key()).hex()

    def sign(self, kind: SignedKind, record: Record) -> Signed:
        """The record in its envelope."""
        payload = record.to_json()
        signature = self._private.sign(_signed_bytes(kind, payload))
        return Signed(kind=kind, payload=payload, key=_key_id(self._private.public_key()), signature=signature.hex())


class TrustedKeys:
    """Public keys whose signatures count.

    Args:
        public: 64 hexadecimal digits each.

    Raises:
        ConfigError: one is no Ed25519 public key.
    """

    def __init__(self, public: Iterable[str]) -> None:
        keys = [_public_key(text) for text in public]
        self._keys = {_key_id(key): key for key in keys}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Keys separated by commas, as in TIDE_PUBLIC_KEYS; none when it is empty."""
        return cls(part.strip() for part in text.split(",") if part.strip())

    @property
    def public(self) -> tuple[str, ...]:
        """The keys, 64 hexadecimal digits each."""
        return tuple(_raw(key).hex() for key in self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def open(self, signed: Signed, kind: SignedKind, model: type[R]) -> R:
        """What was signed.

        Raises:
            SignatureRefused: another kind, an unknown key, another content than was signed, or no such record.
        """
        if signed.kind != kind:
            raise SignatureRefused(f"a signed {kind} is needed, this is a signed {signed.kind}")
        key = self._keys.get(signed.key)
        if key is None:
            raise SignatureRefused(
                f"{kind} signed with key {signed.key}, which is not trusted here; TIDE_PUBLIC_KEYS names those that are"
            )
        try:
            key.verify(bytes.fromhex(signed.signature), _signed_bytes(kind, signed.payload))
            return model.model_validate_json(signed.payload)
        except InvalidSignature as error:
            raise SignatureRefused(f"{kind}: the signature of key {signed.key} is not over this content") from error
        except ValidationError as error:
            raise SignatureRefused(
                f"{kind}: signed content is no {model.__name__}: {error.errors()[0]['msg']}"
            ) from error


def _signed_bytes(kind: SignedKind, payload: str) -> bytes:
    kind_bytes, body = f"application/vnd.tide.{kind}+json".encode(), payload.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind_bytes), kind_bytes, len(body), body)


def _public_key(text: str) -> Ed25519PublicKey:
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError as error:
        raise ConfigError(f"public key {text[:80]!r}: 64 hexadecimal digits are needed ({error})") from error


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(_raw(key)).hexdigest()[:16]
