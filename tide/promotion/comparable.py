"""What makes two evaluation reports comparable: one definition, one target, one walk, the same requests.

Owns the refusals. Knows nothing of statistics or decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide.domain import ACCEPTANCE_DEFINITION, EvalReport, RequestScore
from tide.errors import ContractMismatch, EvaluationError


def check_comparable(candidate: EvalReport, incumbent: EvalReport, states_commit: str) -> None:
    """Refuse two reports whose difference would mean nothing.

    Raises:
        EvaluationError: definition, sampling, steps, topk, draft tokens, states or request set differ; names the part.
        ContractMismatch: they are of two targets.
    """
    if parts := incumbent.target.differences(candidate.target):
        raise ContractMismatch("evaluation reports of incumbent and candidate: target", parts)
    for field in ("definition", "sampling", "steps", "topk", "draft_tokens", "states_commit"):
        ours, theirs = getattr(candidate, field), getattr(incumbent, field)
        if ours != theirs:
            raise EvaluationError(
                f"reports differ in {field}: candidate {ours!r}, incumbent {theirs!r}; walk both again"
            )
    if candidate.definition != ACCEPTANCE_DEFINITION:
        raise EvaluationError(
            f"acceptance is {candidate.definition!r} there, {ACCEPTANCE_DEFINITION!r} here; walk again"
        )
    if candidate.states_commit not in ("", states_commit):
        raise EvaluationError(f"reports are of states {candidate.states_commit}, the verdict is on {states_commit}")
    _check_same_requests(candidate.scores, incumbent.scores)


def _check_same_requests(ours: Sequence[RequestScore], theirs: Sequence[RequestScore]) -> None:
    if not ours:
        raise EvaluationError("the reports hold no request: nothing to compare")
    known = {s.request: s for s in theirs}
    if len({s.request for s in ours}) != len(ours) or len(known) != len(theirs):
        raise EvaluationError("a report holds one request twice; it would count double")
    only = {s.request for s in ours} ^ known.keys()
    if only:
        raise EvaluationError(f"reports are of other requests: {len(only)} stand in one alone, such as {min(only)}")
    for score in ours:
        other = known[score.request]
        for field in ("conversation", "slice", "tokens"):
            if getattr(score, field) != getattr(other, field):
                raise EvaluationError(f"request {score.request}: {field} differs between the reports")
        if bool(score.verify_steps) != bool(other.verify_steps):
            raise EvaluationError(f"request {score.request}: measured in one report only")


def check_reproduced(recorded: float, found: float, tolerance: float) -> None:
    """A draft loaded again must accept what its record says: a shifted vocabulary map trains with good-looking losses.

    Args:
        recorded, found: acceptance lengths on the same requests.
        tolerance: relative.

    Raises:
        EvaluationError: they differ by more.
    """
    if abs(found - recorded) > tolerance * recorded:
        raise EvaluationError(
            f"the parent accepts {found:.3f} where its record says {recorded:.3f} on the same requests: its weights, "
            "its vocabulary map or the states are not what they were; restore the draft from the store and try again"
        )
