"""The states commit that experiments are made on: a small lock file in the project, moved on purpose.

Owns the lock's content and how it is made. Knows nothing of what is done with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from tide.domain import Digest, Value
from tide.errors import ConfigError
from tide.files import write_durably
from tide.serving import rollout
from tide.states import snapshots
from tide.store.base import Store

LOCK = Path("data/snapshot.lock.json")


class Pinned(Value):
    """``data/snapshot.lock.json``: the states commit that experiments are made on, and the draft they start from."""

    repository: str = Field(min_length=1)
    commit: str = Field(min_length=1)
    digest: Digest
    """Of the shards' content: the same data in another store has the same digest under another commit id."""
    drafts_repository: str = ""
    parent: Digest | None = None
    """Draft in serving when this was pinned; None: from scratch."""

    @model_validator(mode="after")
    def _parent_has_a_repository(self) -> Self:
        if self.parent and not self.drafts_repository:
            raise ValueError("a parent without a drafts_repository to find it in")
        return self

    @classmethod
    def load(cls, path: Path = LOCK) -> Self:
        """Read the lock. Raises ConfigError that names what is wrong and says how to make one."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist: pin a states commit with `tide snapshot pin main`") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            what = ".".join(map(str, first["loc"])) or "content"
            raise ConfigError(
                f"{path} pins no states commit ({what}: {first['msg']}): pin one with `tide snapshot pin main`"
            ) from error


def pin(store: Store, states: str, drafts: str, ref: str, path: Path = LOCK) -> Pinned:
    """Move the lock to the commit that a ref of the states repository points at now.

    Raises:
        NotFound: no such ref, or it holds no shards.
    """
    snapshot = snapshots.describe(store, states, ref)
    stable = rollout.read_serving(store, drafts).stable
    pinned = Pinned(
        repository=snapshot.repository,
        commit=snapshot.commit,
        digest=snapshots.content_digest(store, snapshot.repository, snapshot.commit),
        drafts_repository=drafts if stable else "",
        parent=stable.digest if stable else None,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, (json.dumps(pinned.model_dump(mode="json"), indent=2) + "\n").encode())
    return pinned
