"""Where a rollout happens: the drafts repository, the replicas, and how they are brought to a draft.

Owns what one rollout is given. Knows nothing of the order of its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tide.domain import CanaryReport
from tide.engine.base import Engine
from tide.policies import CanaryPolicy
from tide.serving.promoter import owner
from tide.serving.replicas import Bringer, Restart
from tide.store.base import Store


class Watch(Protocol):
    """Looks at a candidate while it serves on the canary."""

    def __call__(
        self,
        replica: Engine,
        *,
        candidate: str,
        incumbent: str | None,
        since: float,
        still_ours: Callable[[], None],
    ) -> CanaryReport:
        """What was seen.

        Args:
            candidate, incumbent: digests; both drafts are in DRAFT_DIR.
            since: when the candidate began to serve, seconds since the epoch.
            still_ours: raises Conflict once the lease is lost.
        """


@dataclass(frozen=True)
class Site:
    """Where a rollout happens."""

    store: Store
    repository: str
    """The drafts repository."""
    replicas: Sequence[Engine]
    draft_dir: Path
    """DRAFT_DIR of the replicas on this host."""
    restart: Restart | None = None
    policy: CanaryPolicy = field(default_factory=CanaryPolicy)
    watch: Watch | None = None
    """None: the first replica is verified, and not watched."""
    run: str = field(default_factory=owner)
    """Who promotes, as a lease names it."""
    clock: Callable[[], float] = time.time

    @property
    def bringer(self) -> Bringer:
        """How a replica is brought to a draft."""
        return Bringer(self.draft_dir, self.restart, self.policy.answer_s)
