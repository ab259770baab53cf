"""Candidate and incumbent request by request, and the slices that a promotion must not harm.

Owns the pairing, the two families of slices (by name, by context length) and that small ones are pooled. Knows nothing
of margins, intervals or outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tide.config import PromotionPolicy
from tide.domain import EvalReport
from tide.errors import ConfigError, EvaluationError

Rows = npt.NDArray[np.bool_]

OTHER = "other"
"""Slice that the small ones are pooled into."""
CONTEXT = "context "
"""What the names of context slices begin with."""


@dataclass(frozen=True)
class Paired:
    """Both reports, request by request, in one order."""

    sums: npt.NDArray[np.float64]
    """[n, 4] candidate tokens and steps, incumbent tokens and steps."""
    conversations: npt.NDArray[np.str_]
    slices: npt.NDArray[np.str_]
    prompt_tokens: npt.NDArray[np.int64]
    """[n] 0 where it is not known."""
    largest: float
    """Bound of a difference of acceptance lengths, in size."""

    @classmethod
    def of(cls, candidate: EvalReport, incumbent: EvalReport) -> Paired:
        """Pair two comparable reports; requests without a verify step are left out.

        Raises:
            EvaluationError: no request was measured.
        """
        theirs = {s.request: s for s in incumbent.scores}
        measured = [(ours, theirs[ours.request]) for ours in candidate.scores if ours.verify_steps]
        if not measured:
            raise EvaluationError("no request of the reports has a verify step: nothing was measured")
        rows = [(a.tokens, a.verify_steps, b.tokens, b.verify_steps) for a, b in measured]
        return cls(
            sums=np.array(rows, dtype=np.float64),
            conversations=np.array([a.conversation for a, _ in measured]),
            slices=np.array([a.slice for a, _ in measured]),
            prompt_tokens=np.array([a.prompt_tokens for a, _ in measured], dtype=np.int64),
            largest=float(candidate.steps + 1),
        )

    def everything(self) -> Rows:
        """[n] all requests."""
        return np.ones(len(self.sums), dtype=np.bool_)


def slices_of(paired: Paired, policy: PromotionPolicy) -> list[tuple[str, Rows]]:
    """Rows of each slice, by name and by context; those with too few requests together as ``other`` of their family.

    A context slice that holds every request is left out: it says what the whole says.

    Raises:
        ConfigError: ``slice_margins`` names a slice that no request has.
    """
    contexts = context_slices(paired.prompt_tokens, policy.context_bounds)
    _check_margins(paired, policy)
    named = _family(paired.slices, policy.min_slice_requests, "")
    by_context = _family(contexts, policy.min_slice_requests, CONTEXT)
    return [*named, *((name, rows) for name, rows in by_context if not rows.all())]


def context_slices(prompt_tokens: npt.NDArray[np.int64], bounds: Sequence[int]) -> npt.NDArray[np.str_]:
    """[n] ``context 0-1k`` and so on by the tokens of the prompt; empty where they are not known."""
    if not bounds:
        return np.full(len(prompt_tokens), "")
    names = np.array(list(context_names(bounds)))
    found = names[np.searchsorted(np.array(bounds), prompt_tokens, side="right")]
    return np.where(prompt_tokens > 0, found, "")


def context_names(bounds: Sequence[int]) -> Iterator[str]:
    """Names of the context slices, shortest first."""
    ends = [_tokens(bound) for bound in bounds]
    for start, end in zip(["0", *ends], ends, strict=False):
        yield f"{CONTEXT}{start}-{end}"
    if ends:
        yield f"{CONTEXT}{ends[-1]}+"


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _family(labels: npt.NDArray[np.str_], minimum: int, prefix: str) -> list[tuple[str, Rows]]:
    """Rows of each label; empty ones belong nowhere, rare ones to ``other``."""
    names, counts = np.unique(labels[labels != ""] if prefix else labels, return_counts=True)
    other = prefix + OTHER
    large = [str(n) for n, count in zip(names, counts, strict=True) if count >= minimum and n != other]
    found = [(name, labels == name) for name in large]
    rest = np.isin(labels, [n for n in names if str(n) not in large])
    return [*found, (other, rest)] if rest.any() else found


def _check_margins(paired: Paired, policy: PromotionPolicy) -> None:
    known = {*map(str, np.unique(paired.slices)), *context_names(policy.context_bounds), OTHER, CONTEXT + OTHER}
    if unknown := sorted(policy.slice_margins.keys() - known):
        raise ConfigError(
            f"promotion.slice_margins names {', '.join(map(repr, unknown))}: the gate requests have "
            f"{', '.join(sorted(known))}; correct the name or take it out"
        )
