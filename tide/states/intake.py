"""What a spooled file must pass before it becomes data: the good go on, the others go to quarantine with a reason.

Owns the order of checks and the names of the rules. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from tide.domain import TargetContract
from tide.errors import BadInputError, ContractMismatch, ShardError
from tide.states import spool as spools
from tide.states.requests import read_segment
from tide.states.shard_checks import validate_shard
from tide.states.spool import SpooledSegment, SpooledShard

Item = TypeVar("Item", SpooledShard, SpooledSegment)


@dataclass
class Intake:
    """Checks the files of one window.

    Args:
        target: the target that serves; None: the first good file decides.
        head: [V, H] lm_head weight for the semantic check of shards; None leaves it out.
    """

    spool: Path
    window: str
    target: TargetContract | None
    head: torch.Tensor | None
    refused: dict[str, str] = field(default_factory=dict)
    """Rule by file name, of this run."""

    def shards(self, items: Sequence[SpooledShard]) -> list[SpooledShard]:
        """The good ones, in order of closing; the others are in quarantine."""
        return self._sift(items, self._check_shard)

    def segments(self, items: Sequence[SpooledSegment]) -> list[SpooledSegment]:
        """The good ones, in order of closing; the others are in quarantine."""
        return self._sift(items, self._check_segment)

    def _sift(self, items: Sequence[Item], check: Callable[[Item], None]) -> list[Item]:
        good = []
        for item in sorted(items, key=lambda i: (i.manifest.closed_at, i.manifest.name)):
            try:
                check(item)
            except ContractMismatch as error:
                self._refuse(item.path, "wrong_target", error)
            except ShardError as error:
                self._refuse(item.path, error.rule, error)
            except BadInputError as error:
                self._refuse(item.path, "bad_segment", error)
            else:
                good.append(item)
                self.target = self.target or item.manifest.target
        return good

    def _check_shard(self, item: SpooledShard) -> None:
        name, manifest = item.path.name, item.manifest
        if name != manifest.file:
            raise ShardError(name, "wrong_name", f"the manifest describes {manifest.file}")
        if item.path.parent.name != manifest.split:
            raise ShardError(name, "wrong_split", f"split {manifest.split} lies in {item.path.parent.name}/")
        try:
            validate_shard(item.path, expected_target=self.target, head=self.head)
        except FileNotFoundError as error:
            raise ShardError(name, "missing_file", "there is a manifest and no file") from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            # A file that makes the validator itself fail must not stop this and all later windows for ever.
            raise ShardError(name, "unreadable", f"{type(error).__name__}: {error}") from error

    def _check_segment(self, item: SpooledSegment) -> None:
        if item.path.name != item.manifest.file:
            raise BadInputError(f"request segment {item.path.name}: the manifest describes {item.manifest.file}")
        if self.target is not None and (parts := self.target.differences(item.manifest.target)):
            raise ContractMismatch(f"request segment {item.path.name}: target", parts)
        read_segment(item.path.with_suffix(".json"))

    def _refuse(self, path: Path, rule: str, error: BadInputError | ContractMismatch) -> None:
        note = spools.quarantine(self.spool, path, window=self.window, rule=rule, detail=str(error))
        self.refused[path.name] = note.rule
