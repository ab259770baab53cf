"""The rule of what may serve: a statement signed by the promoter, on a verdict signed by the evaluator.

One rule for all doors: the promoter, `reconcile` and the swap inside each engine. Pure: values and keys in. Knows
nothing of stores, of engines, or of how a verdict came about.
"""

from __future__ import annotations

from tide.domain import Attestation, Signed, Verdict
from tide.errors import SignatureRefused
from tide.names import require_digest
from tide.signatures.signing import SigningKey, TrustedKeys


def attestation_file(draft: str) -> str:
    """Its name in DRAFT_DIR, beside the draft's folder: the promoter writes it, the engine's swap reads it."""
    return f"{require_digest(draft, 'draft digest')}.attestation.json"


def check_verdict(signed: Signed, draft: str, trusted: TrustedKeys) -> Verdict:
    """The verdict that lets this draft serve.

    Args:
        draft: digest of the draft that wants to serve.

    Raises:
        SignatureRefused: not signed by a trusted key, about another draft, or it does not say ``promote``.
    """
    verdict = trusted.open(signed, "verdict", Verdict)
    if verdict.candidate != draft:
        raise SignatureRefused(f"the verdict is about draft {verdict.candidate[:12]}, not about {draft[:12]}")
    if verdict.outcome != "promote":
        raise SignatureRefused(f"the verdict on draft {draft[:12]} is {verdict.outcome}, not promote")
    return verdict


def check_attestation(signed: Signed, draft: str, trusted: TrustedKeys) -> Attestation:
    """The statement by which this draft may serve, its verdict checked with it.

    Raises:
        SignatureRefused: not signed by a trusted key, about another draft, or without the verdict it needs.
    """
    found = trusted.open(signed, "attestation", Attestation)
    if found.draft != draft:
        raise SignatureRefused(f"the attestation is for draft {found.draft[:12]}, not for {draft[:12]}")
    if found.verdict is not None:
        check_verdict(found.verdict, draft, trusted)
    elif found.kind != "rollback":
        raise SignatureRefused(f"the attestation of draft {draft[:12]} is a {found.kind} without a verdict")
    return found


class Authority:
    """Who signs what is decided here, and whose signatures count."""

    def __init__(self, key: SigningKey, trusted: TrustedKeys) -> None:
        self.key, self.trusted = key, trusted

    def attest(self, statement: Attestation) -> Signed:
        """The statement signed, if it passes the rule that every door applies.

        Raises:
            SignatureRefused: it would be refused; also when our own key is not among the trusted ones.
        """
        signed = self.key.sign("attestation", statement)
        check_attestation(signed, statement.draft, self.trusted)
        return signed
