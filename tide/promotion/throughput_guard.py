"""Whether a better acceptance length is also faster: the promotion gate's guard on predicted throughput.

Owns the comparison and its wording. The prediction itself is in tide.throughput; knows nothing of where profile and
load come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tide.acceptance import NO_DRAFT
from tide.domain import EngineProfile, EvalReport, PredictedThroughput, SliceVerdict
from tide.errors import ContractMismatch, EvaluationError
from tide.throughput.prediction import break_even, predict


@dataclass(frozen=True)
class Guard:
    """What the profile says of two drafts."""

    predicted: PredictedThroughput | None
    objections: tuple[str, ...]
    """Why the candidate must not serve; empty when nothing speaks against it."""
    notes: tuple[str, ...]


def guard(
    candidate: EvalReport,
    incumbent: EvalReport,
    overall: SliceVerdict,
    profile: EngineProfile | None,
    concurrency: Mapping[int, float] | None,
) -> Guard:
    """Predict both drafts' throughput over the service's own load, and object where it falls.

    It falls when even the gain's upper bound predicts less than the incumbent has, or when the candidate is predicted
    to be slower than no speculation at all.

    Args:
        concurrency: share of the output tokens generated with so many requests running.

    Raises:
        EvaluationError: the profile is of trees of another width than the reports.
        ContractMismatch: it is of another target.
    """
    if profile is None:
        return Guard(
            None, (), ("throughput: not profiled, so not checked: what a step costs on this engine is unknown",)
        )
    if not concurrency or not sum(concurrency.values()) > 0:
        return Guard(None, (), ("throughput: not checked: how many requests run at once is unknown",))
    _check_profile(candidate, profile)
    steps = candidate.steps

    def speed(length: float) -> float:
        return predict(profile, length, steps=steps, concurrency=concurrency)

    predicted = PredictedThroughput(
        candidate=speed(overall.candidate),
        incumbent=1.0 if incumbent.draft == NO_DRAFT else speed(overall.incumbent),
        break_even=break_even(profile, steps=steps, concurrency=concurrency),
        concurrency=dict(concurrency),
    )
    best = speed(overall.incumbent + overall.difference.high)
    objections = tuple(_objections(overall, predicted, best))
    return Guard(predicted, objections, () if objections else (f"throughput: {_figures(predicted)}",))


def _check_profile(report: EvalReport, profile: EngineProfile) -> None:
    if profile.topk != report.topk:
        raise EvaluationError(
            f"the engine's profile is of topk {profile.topk}, the reports are of topk {report.topk}: profile it again"
        )
    if profile.target and (parts := profile.target.differences(report.target)):
        raise ContractMismatch("evaluation report and engine profile: target", parts)


def _objections(overall: SliceVerdict, predicted: PredictedThroughput, best: float) -> list[str]:
    found = []
    if predicted.candidate < 1:
        found.append(
            f"throughput: speculation itself does not pay at this load: {_figures(predicted)}; it breaks even at an "
            f"acceptance length of {predicted.break_even:.3f}, the candidate has {overall.candidate:.3f}"
        )
    if best < predicted.incumbent:
        found.append(f"throughput: it falls, at best to {best:.3f} of plain decoding: {_figures(predicted)}")
    return found


def _figures(predicted: PredictedThroughput) -> str:
    weight = sum(predicted.concurrency.values())
    mean = sum(b * share for b, share in predicted.concurrency.items()) / weight
    return (
        f"predicted {predicted.candidate:.3f} times plain decoding against {predicted.incumbent:.3f}, "
        f"at a mean concurrency of {mean:.1f}"
    )
