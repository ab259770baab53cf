"""Where a report's acceptance comes from: by depth, by slice, by length of the answer and of the prompt.

Pure; nothing here decides. Every length is pooled (tokens over verify steps), as ``ACCEPTANCE_DEFINITION`` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tide.domain import EvalReport, RequestScore

UNKNOWN = "unknown"
"""Group of requests whose prompt's length was not recorded."""


@dataclass(frozen=True)
class Group:
    """Some requests of a report, pooled."""

    name: str
    requests: int
    tokens: int
    verify_steps: float

    @property
    def acceptance_length(self) -> float:
        """Tokens over verify steps; 1.0 when nothing was verified."""
        return self.tokens / self.verify_steps if self.verify_steps else 1.0


def by_depth(report: EvalReport) -> tuple[float, ...]:
    """Share of verify steps that accepted at least d + 1 proposals, by depth d.

    A value over the one before it is the acceptance rate of that depth where it was reached. Empty when no score of the
    report says it; scores that do not are left out.
    """
    known = [score for score in report.scores if score.accepted_at]
    steps = sum(score.verify_steps for score in known)
    depths = max((len(score.accepted_at) for score in known), default=0) if steps else 0
    return tuple(sum(s.accepted_at[d] for s in known if d < len(s.accepted_at)) / steps for d in range(depths))


def by_slice(report: EvalReport) -> tuple[Group, ...]:
    """Acceptance of each slice, by name."""
    return _grouped(report.scores, lambda score: (0, score.slice))


def by_output_length(report: EvalReport) -> tuple[Group, ...]:
    """Acceptance by generated tokens, in buckets of powers of two."""
    return _grouped(report.scores, lambda score: _bucket(score.tokens))


def by_context_length(report: EvalReport) -> tuple[Group, ...]:
    """Acceptance by prompt tokens, in buckets of powers of two; ``unknown`` first."""
    return _grouped(report.scores, lambda score: _bucket(score.prompt_tokens) if score.prompt_tokens else (0, UNKNOWN))


def _bucket(length: int) -> tuple[int, str]:
    """Where a bucket sorts, and its name: ``1``, ``2-3``, ``4-7`` and so on."""
    low = 1 << (length.bit_length() - 1) if length else 0
    high = max(2 * low - 1, low)
    return low, f"{low}-{high}" if high > low else str(low)


def _grouped(scores: Sequence[RequestScore], key: Callable[[RequestScore], tuple[int, str]]) -> tuple[Group, ...]:
    groups: dict[tuple[int, str], list[RequestScore]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return tuple(
        Group(name, len(some), sum(s.tokens for s in some), sum(s.verify_steps for s in some))
        for (_, name), some in sorted(groups.items())
    )
