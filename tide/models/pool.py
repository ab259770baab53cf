"""The draft pool: which of the drafts that served before fits what is served now better than the one in serving.

Pure: records and reports in, a choice out. Knows nothing of stores, of how a draft is walked, or of the gate that
judges the chosen one like any other candidate.

The best of several is chosen on the selection split and judged on the gate split: chosen and judged on the same
requests it would look better than it is, the more drafts the better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tide.domain import DraftModel, DriftReport, EvalReport, PoolChoice, Promotion, TargetContract
from tide.promotion.comparable import check_comparable


def wanted(drift: DriftReport) -> bool:
    """True when a draft that served before may be what is needed: the workload changed. More tokens, or a first draft,
    call for training."""
    return drift.decision == "retrain" and drift.cause == "drift"


def members(promotions: Iterable[Promotion], incumbent: str, limit: int) -> list[str]:
    """Digests of the drafts that served before, the one that served last first, the incumbent left out.

    Args:
        promotions: changes of what serves, rollbacks included.
        limit: at most so many.
    """
    newest_first = sorted(promotions, key=lambda p: p.generation, reverse=True)
    drafts = dict.fromkeys(p.draft for p in newest_first)
    return [digest for digest in drafts if digest != incumbent][:limit]


def unfit(draft: DraftModel, incumbent: DraftModel, target: TargetContract) -> str | None:
    """Why a draft cannot take the incumbent's place by a hot swap; None when it can."""
    parts = target.differences(draft.target) or incumbent.contract.differences(draft.contract, hot_swap=True)
    return "; ".join(parts) or None


def choose(
    incumbent: EvalReport, pool: Sequence[EvalReport], min_gain: float, *, left_out: Mapping[str, str] | None = None
) -> PoolChoice:
    """The draft of the pool with the longest acceptance, if it gains more than ``min_gain`` on the incumbent.

    Of equal ones the one that served later is taken.

    Args:
        incumbent: report of the draft in serving on the selection requests.
        pool: reports on the same requests, the draft that served last first.
        min_gain: acceptance length.
        left_out: why others were not walked, for the record.

    Raises:
        EvaluationError: a report is not comparable with the incumbent's; names the part.
        ContractMismatch: it is of another target.
    """
    for report in pool:
        check_comparable(report, incumbent, incumbent.states_commit)
    lengths = {report.draft: report.acceptance_length for report in pool}
    best = max(lengths, key=lambda draft: lengths[draft], default=None)
    chosen, reason = _decide(best, lengths, incumbent.acceptance_length, min_gain)
    return PoolChoice(
        chosen=chosen,
        reason=reason,
        incumbent=incumbent.draft,
        incumbent_length=incumbent.acceptance_length,
        lengths=lengths,
        left_out=dict(left_out or {}),
        requests=len(incumbent.scores),
        states_commit=incumbent.states_commit,
    )


def nothing(incumbent: str, reason: str, states_commit: str, left_out: Mapping[str, str] | None = None) -> PoolChoice:
    """The choice when no draft could be walked."""
    return PoolChoice(
        chosen=None,
        reason=reason,
        incumbent=incumbent,
        incumbent_length=None,
        lengths={},
        left_out=dict(left_out or {}),
        requests=0,
        states_commit=states_commit,
    )


def _decide(
    best: str | None, lengths: Mapping[str, float], incumbent: float, min_gain: float
) -> tuple[str | None, str]:
    if best is None:
        return None, "no other draft that served before can be walked"
    gain = lengths[best] - incumbent
    figures = f"draft {best[:12]}, the best of {len(lengths)} that served before, has {lengths[best]:.3f}"
    against = f"the incumbent {incumbent:.3f}, gain {gain:+.3f}"
    if gain > min_gain:
        return best, f"{figures}, {against}, above {min_gain:+.3f}"
    return None, f"{figures}, {against}: not above {min_gain:+.3f}"
