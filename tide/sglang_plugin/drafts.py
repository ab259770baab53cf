"""Drafts that the engine may serve: where they are found, and whether one may take the place of the one in serving.

Owns the draft folder (``TIDE_DRAFT_DIR/<sha256>/`` and the ``serving`` pointer beside them) and the copies held on the
host. Knows nothing of SGLang, of parameters or of when a swap happens.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from tide.domain import Signed, TargetContract
from tide.errors import ContractMismatch, DraftError, SignatureRefused
from tide.models.draft_files import DraftFiles, load_draft
from tide.names import is_digest
from tide.signatures.attestation import attestation_file, check_attestation
from tide.signatures.signing import TrustedKeys

SERVING_FILE = "serving"
"""In the draft folder: the digest to serve after a restart. Whoever promotes writes it by temp and rename."""
HELD_DRAFTS = 2
"""Drafts kept in host memory: the one in serving and the one before it, so that going back needs no file."""


class DraftShelf:
    """Drafts by digest: from host memory, else from the draft folder.

    Args:
        folder: TIDE_DRAFT_DIR; None when swapping is not set up.
        trusted: whose signatures let a draft serve; None: signatures are not asked for.
    """

    def __init__(self, folder: Path | None, trusted: TrustedKeys | None = None) -> None:
        self.folder, self.trusted = folder, trusted
        self._held: dict[str, DraftFiles] = {}

    def find(self, digest: str) -> DraftFiles:
        """The draft of this digest, read and checked in full unless it is held.

        Raises:
            DraftError: no digest, unknown, or its files are refused.
            ContractMismatch: its files do not belong together.
            SignatureRefused: no attestation beside it allows it to serve.
        """
        if not is_digest(digest):
            raise DraftError(f"{digest[:80]!r} is no draft digest: 64 hexadecimal digits, never a path")
        if digest in self._held:
            return self._held[digest]
        if self.folder is None:
            raise DraftError("TIDE_DRAFT_DIR is not set on the engine: it cannot look up drafts")
        folder = self.folder / digest
        if folder.is_symlink() or not folder.is_dir():
            raise DraftError(f"draft {digest[:12]} is not in {self.folder}: put its folder there first")
        self.require_attested(digest)
        return load_draft(folder, expected=digest)

    def require_attested(self, digest: str) -> None:
        """Check what allows a draft to serve. Raises SignatureRefused when it is missing or forged."""
        if self.trusted is None or self.folder is None:
            return
        path = self.folder / attestation_file(digest)
        try:
            signed = Signed.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise SignatureRefused(f"draft {digest[:12]} has no {path.name}: it was not promoted") from error
        except (OSError, ValidationError) as error:
            raise SignatureRefused(f"{path} cannot be read: {error}") from error
        check_attestation(signed, digest, self.trusted)

    def hold(self, draft: DraftFiles) -> None:
        """Keep a draft on the host as the newest; the one held longest makes room."""
        self._held.pop(draft.digest, None)
        self._held[draft.digest] = draft
        while len(self._held) > HELD_DRAFTS:
            del self._held[next(iter(self._held))]

    def serving(self) -> str | None:
        """Digest named by the ``serving`` pointer; None when there is no pointer.

        Raises:
            DraftError: the pointer holds something else than a digest.
        """
        if self.folder is None:
            return None
        pointer = self.folder / SERVING_FILE
        try:
            digest = pointer.read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise DraftError(f"{pointer}: unreadable: {error}") from error
        if not is_digest(digest):
            raise DraftError(f"{pointer}: holds {digest[:80]!r}, not a draft digest; write one, or remove the file")
        return digest


def check_swappable(served: DraftFiles, candidate: DraftFiles, target: TargetContract | None) -> None:
    """Refuse a candidate that a running engine cannot take in: it exchanges weights and map, nothing else.

    Args:
        served: the draft that the engine was built for.
        candidate: a valid draft.
        target: identity of the target in serving; None when it is not known, which a candidate's record then is not
            held against.

    Raises:
        DraftError: the vocabulary map would appear or vanish.
        ContractMismatch: names each differing part of the draft contract or of the target contract.
    """
    differences = served.contract.differences(candidate.contract, hot_swap=True)
    if differences:
        raise ContractMismatch(f"draft (a restart with draft {candidate.digest[:12]} is needed)", differences)
    if ("d2t" in served.tensors) != ("d2t" in candidate.tensors):
        raise DraftError(f"draft {candidate.digest[:12]}: one has a d2t and the other none: a restart is needed")
    if candidate.record is not None and target is not None:
        differences = target.differences(candidate.record.target)
        if differences:
            raise ContractMismatch(
                f"target (in serving, and the one draft {candidate.digest[:12]} is for)", differences
            )
