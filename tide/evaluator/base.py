"""The evaluator port: what acceptance a draft would have had on logged held-out requests.

Knows nothing of stores, of the other draft it will be compared with, or of thresholds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from tide.domain import EvalReport, RequestScore, Split


class Evaluator(ABC):
    """Walks drafts over logged hidden states."""

    @abstractmethod
    def evaluate(
        self,
        draft: Path,
        shards: Sequence[Path],
        *,
        bundle: Path,
        split: Split,
        steps: int,
        topk: int = 1,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
        states_commit: str = "",
    ) -> EvalReport:
        """Acceptance of a draft, request by request, by the verify-step walk that serving does.

        Args:
            draft: draft folder (``config.json``, ``model.safetensors``).
            shards: local shard files of ``held_out``, each with its manifest beside it.
            bundle: head-only target bundle (for the embedding).
            split: which conversations to walk (gate or selection).
            steps, topk, draft_tokens: what a verify step looks at, as in serving; the last may be left out for a chain
                (topk 1).
            temperature: 0 walks the requests that were decoded greedily and counts; above it those that were sampled,
                taken to have had this temperature, get their expected acceptance.

        Raises:
            DraftError: the draft's files are refused.
            ContractMismatch: draft, shards and bundle are not of one target.
            EvaluationError: no such request of this split is in the shards, or an argument cannot be served: names it.
        """

    @abstractmethod
    def walk(
        self,
        draft: Path,
        shards: Sequence[Path],
        requests: AbstractSet[str],
        *,
        bundle: Path,
        steps: int,
        topk: int = 1,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> list[RequestScore]:
        """What a draft would have had on named requests, whatever their split: no report, and nothing to train by.

        For requests served after every draft concerned was trained, which none of them can have learnt. Left out are
        those too short for a verify step, and those whose shard lacks most of their prompt: trimmed, or found in the
        prefix cache.

        Args:
            draft, bundle, steps, topk, draft_tokens, temperature: as in ``evaluate``.
            shards: of ``train`` or ``held_out``.
            requests: names of requests, all decoded at this temperature.

        Raises:
            DraftError, ContractMismatch, EvaluationError: as ``evaluate``, but that nothing to walk is no error.
            ShardError: a shard cannot be read.
        """
