"""Signatures: what was signed is what is read, and nothing else passes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.signed import AUTHORITY, KEY, STRANGER, attestation, verdict_on
from tide.config import Settings
from tide.domain import Signed, Verdict
from tide.errors import ConfigError, SignatureRefused
from tide.signatures import keys
from tide.signatures.attestation import Authority, check_attestation, check_verdict
from tide.signatures.signing import SigningKey, TrustedKeys

A, B = "a" * 64, "b" * 64
TRUSTED = AUTHORITY.trusted


def test_what_is_opened_is_what_was_signed() -> None:
    verdict = verdict_on(A)
    signed = Signed.model_validate_json(KEY.sign("verdict", verdict).to_json())
    assert TRUSTED.open(signed, "verdict", Verdict) == verdict


def test_the_signed_bytes_are_dsse_s_pre_authentication_encoding() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    signed = KEY.sign("verdict", verdict_on(A))
    body = signed.payload.encode()
    kind = b"application/vnd.tide.verdict+json"
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(KEY.public))
    public.verify(bytes.fromhex(signed.signature), b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(body), body))


@given(st.data())
def test_a_change_of_any_character_is_noticed(data: st.DataObject) -> None:
    signed = KEY.sign("verdict", verdict_on(A))
    at = data.draw(st.integers(0, len(signed.payload) - 1))
    other = data.draw(st.characters(min_codepoint=32, max_codepoint=126).filter(lambda c: c != signed.payload[at]))
    changed = signed.model_copy(update={"payload": signed.payload[:at] + other + signed.payload[at + 1 :]})
    with pytest.raises(SignatureRefused, match="not over this content"):
        TRUSTED.open(changed, "verdict", Verdict)


def test_a_signature_on_one_kind_of_record_does_not_pass_for_another() -> None:
    signed = KEY.sign("approval", verdict_on(A))
    with pytest.raises(SignatureRefused, match="a signed verdict is needed"):
        TRUSTED.open(signed, "verdict", Verdict)
    with pytest.raises(SignatureRefused, match="not over this content"):
        TRUSTED.open(signed.model_copy(update={"kind": "verdict"}), "verdict", Verdict)


def test_a_key_that_is_not_trusted_is_named() -> None:
    signed = STRANGER.sign("verdict", verdict_on(A))
    with pytest.raises(SignatureRefused, match=f"key {signed.key}, which is not trusted here"):
        TRUSTED.open(signed, "verdict", Verdict)


def test_several_keys_may_be_trusted_while_they_are_exchanged() -> None:
    both = TrustedKeys.parse(f"{KEY.public}, {STRANGER.public}")
    assert len(both) == 2
    for key in (KEY, STRANGER):
        assert both.open(key.sign("verdict", verdict_on(A)), "verdict", Verdict).candidate == A


def test_an_attestation_needs_a_promote_verdict_on_its_own_draft() -> None:
    good = KEY.sign("verdict", verdict_on(A))
    assert check_attestation(AUTHORITY.attest(attestation(A, good)), A, TRUSTED).draft == A
    refused = [
        (attestation(A, None, kind="promotion"), A, "without a verdict"),
        (attestation(A, None, kind="canary"), A, "without a verdict"),
        (attestation(A, good), B, "is for draft aaa"),
        (attestation(B, good), B, "about draft aaa"),
        (attestation(A, KEY.sign("verdict", verdict_on(A, outcome="reject"))), A, "is reject, not promote"),
        (attestation(A, STRANGER.sign("verdict", verdict_on(A))), A, "not trusted"),
    ]
    for statement, draft, why in refused:
        with pytest.raises(SignatureRefused, match=why):
            check_attestation(KEY.sign("attestation", statement), draft, TRUSTED)


def test_a_rollback_needs_no_verdict_but_a_signature() -> None:
    statement = attestation(A, None)
    assert check_attestation(KEY.sign("attestation", statement), A, TRUSTED) == statement
    with pytest.raises(SignatureRefused, match="not trusted"):
        check_attestation(STRANGER.sign("attestation", statement), A, TRUSTED)


def test_an_authority_whose_own_key_is_not_trusted_signs_nothing() -> None:
    with pytest.raises(SignatureRefused, match="not trusted"):
        Authority(STRANGER, TRUSTED).attest(attestation(A, None))


def test_a_verdict_is_about_the_draft_that_wants_to_serve() -> None:
    signed = KEY.sign("verdict", verdict_on(A))
    assert check_verdict(signed, A, TRUSTED).candidate == A
    with pytest.raises(SignatureRefused, match="about draft aaa"):
        check_verdict(signed, B, TRUSTED)


# Key files


def test_a_key_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path, key = keys.ensure(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.ensure(tmp_path)[1].public == key.public
    assert list(path.parent.iterdir()) == [path]


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path, _ = keys.ensure(tmp_path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"0640.*chmod 600"):
        keys.read(path)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN NONSENSE-----", b"\x00" * 32])
def test_what_is_no_key_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "signing.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"signing\.pem: no private key"):
        keys.read(path)
    with pytest.raises(ConfigError, match="tide init"):
        keys.read(tmp_path / "missing.pem")


def test_a_key_of_another_algorithm_is_refused() -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(ConfigError, match="Ed25519 key is needed"):
        SigningKey.from_pem(pem)


@pytest.mark.parametrize("text", ["abc", "zz" * 32, "00" * 31])
def test_a_malformed_public_key_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TrustedKeys.parse(text)


def test_settings_without_keys_say_where_to_get_them(tmp_path: Path) -> None:
    from tide import wiring

    config = Settings(home=tmp_path, signing_key_file="", public_keys="")  # type: ignore[arg-type]
    assert config.signing_key_file is None
    with pytest.raises(ConfigError, match="TIDE_SIGNING_KEY_FILE"):
        wiring.signing_key(config)
    with pytest.raises(ConfigError, match="TIDE_PUBLIC_KEYS"):
        wiring.trusted(config)
