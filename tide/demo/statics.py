"""The static draft of an earlier telling, kept by what it was made from, so that a second run need not train it again.

Owns the cache folder and its key. Knows nothing of training.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from tide.config import Policy
from tide.demo.traffic import Prompt
from tide.domain import DraftModel
from tide.files import whole_folder


def key(bundle: Path, policy: Policy, served: Sequence[Prompt], tokens: int) -> str:
    """Digest of target, training knobs and traffic: a change of any makes the kept draft another one's."""
    digest = hashlib.sha256((bundle / "contract.json").read_bytes())
    digest.update(policy.train.to_json().encode())
    digest.update(f"{policy.train_tokens}:{tokens}".encode())
    for prompt in served:
        digest.update(repr(prompt.messages).encode())
    return digest.hexdigest()


def find(home: Path, wanted: str) -> Path | None:
    """Folder of the kept draft, or None."""
    folder = home / "static" / wanted
    return folder if (folder / "draft.json").is_file() else None


def keep(home: Path, wanted: str, draft: Path) -> None:
    """Keep a promoted draft."""
    with whole_folder(home / "static" / wanted) as temporary:
        shutil.copytree(draft, temporary, dirs_exist_ok=True)


def record(folder: Path) -> DraftModel:
    """The record of a kept draft."""
    return DraftModel.model_validate_json((folder / "draft.json").read_bytes())
