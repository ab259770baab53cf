"""The promotion rule: candidate and incumbent on the same gate requests, promote, reject or inconclusive, with reasons.

Owns the decision. Knows nothing of stores, drafts or how a report was made; the statistics are in ``acceptance``, what
makes two reports comparable in ``comparable``. Every figure is in acceptance length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tide.acceptance import POWER_80, Floats, PairedDifference, paired_difference
from tide.comparable import check_comparable
from tide.config import PromotionPolicy
from tide.domain import EvalReport, SliceVerdict, Verdict
from tide.errors import EvaluationError

Outcome = Literal["promote", "reject", "inconclusive"]

OTHER = "other"
"""Slice that the small ones are pooled into."""
MORE_REQUESTS_LIMIT = 1_000_000
"""Asking for more than this means: the difference is too close to the threshold to be told from it."""


def decide(
    candidate: EvalReport,
    incumbent: EvalReport,
    policy: PromotionPolicy,
    *,
    attempt: int,
    states_commit: str,
    policy_digest: str,
) -> Verdict:
    """Whether the candidate may replace the incumbent.

    Args:
        candidate, incumbent: reports on the same requests; see ``baseline_without_draft`` for a first draft.
        attempt: 1 for the first verdict on this gate generation against this incumbent, counting up; each later one
            gets a smaller share of the family's alpha.
        states_commit, policy_digest: what the verdict binds to.

    Raises:
        EvaluationError: the reports cannot be compared; the message names the part.
        ContractMismatch: they are of two targets.
    """
    check_comparable(candidate, incumbent, states_commit)
    if attempt < 1:
        raise EvaluationError(f"attempt is {attempt}; the first verdict on a gate generation is attempt 1")
    alpha = attempt_alpha(policy.alpha, attempt)
    paired = _Paired.of(candidate, incumbent)
    overall = _compare("overall", paired, paired.everything(), policy, alpha)
    slices = [_compare(name, paired, rows, policy, alpha) for name, rows in _slices(paired, policy)]
    outcome, reasons, more = _rule(overall, slices, policy, attempt)
    return Verdict(
        outcome=outcome,
        candidate=candidate.draft,
        incumbent=incumbent.draft,
        reasons=tuple(reasons),
        overall=overall.verdict,
        slices=tuple(s.verdict for s in slices),
        alpha=alpha,
        attempt=attempt,
        detectable_effect=overall.detectable,
        more_requests=more if outcome == "inconclusive" else 0,
        states_commit=states_commit,
        policy=policy_digest,
        target=candidate.target,
        definition=candidate.definition,
        sampling=candidate.sampling,
    )


def attempt_alpha(alpha: float, attempt: int) -> float:
    """Share of a family's alpha that its k-th verdict gets: 6 alpha / (pi^2 k^2), which sums to alpha."""
    return 6 * alpha / (math.pi**2 * attempt**2)


@dataclass(frozen=True)
class _Paired:
    """Both reports, request by request, in one order."""

    sums: Floats
    """[n, 4] candidate tokens and steps, incumbent tokens and steps."""
    conversations: npt.NDArray[np.str_]
    slices: npt.NDArray[np.str_]
    largest: float

    @classmethod
    def of(cls, candidate: EvalReport, incumbent: EvalReport) -> _Paired:
        theirs = {s.request: s for s in incumbent.scores}
        measured = [(ours, theirs[ours.request]) for ours in candidate.scores if ours.verify_steps]
        if not measured:
            raise EvaluationError("no request of the reports has a verify step: nothing was measured")
        rows = [(a.tokens, a.verify_steps, b.tokens, b.verify_steps) for a, b in measured]
        return cls(
            sums=np.array(rows, dtype=np.float64),
            conversations=np.array([a.conversation for a, _ in measured]),
            slices=np.array([a.slice for a, _ in measured]),
            largest=float(candidate.steps + 1),
        )

    def everything(self) -> npt.NDArray[np.bool_]:
        return np.ones(len(self.sums), dtype=np.bool_)


@dataclass(frozen=True)
class _Comparison:
    verdict: SliceVerdict
    difference: PairedDifference
    conversations: int
    decides: bool

    @property
    def detectable(self) -> float:
        """Smallest true gain beyond a threshold that so many requests would show 4 times in 5."""
        return (self.difference.reach + POWER_80) * self.difference.error

    def more(self, threshold: float) -> int:
        """Further requests of this kind until the estimate, if true, is told from the threshold 4 times in 5."""
        distance = abs(self.difference.interval.estimate - threshold)
        if distance * math.sqrt(MORE_REQUESTS_LIMIT / self.verdict.requests) <= self.detectable:
            return MORE_REQUESTS_LIMIT
        needed = self.verdict.requests * (self.detectable / distance) ** 2
        return max(math.ceil(needed) - self.verdict.requests, 1)


def _compare(
    name: str, paired: _Paired, rows: npt.NDArray[np.bool_], policy: PromotionPolicy, alpha: float
) -> _Comparison:
    difference = paired_difference(
        paired.sums[rows],
        paired.conversations[rows],
        alpha=alpha,
        resamples=policy.resamples,
        seed=policy.seed,
        largest=paired.largest,
    )
    requests = int(rows.sum())
    verdict = SliceVerdict(
        slice=name,
        requests=requests,
        candidate=difference.candidate,
        incumbent=difference.incumbent,
        difference=difference.interval,
    )
    enough = name != OTHER or requests >= policy.min_slice_requests
    return _Comparison(verdict, difference, len(np.unique(paired.conversations[rows])), enough)


def _slices(paired: _Paired, policy: PromotionPolicy) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Rows of each slice; those with too few requests together as ``other``."""
    names, counts = np.unique(paired.slices, return_counts=True)
    large = [str(n) for n, count in zip(names, counts, strict=True) if count >= policy.min_slice_requests]
    found = [(name, paired.slices == name) for name in large if name != OTHER]
    rest = ~np.isin(paired.slices, [name for name, _ in found])
    return [*found, (OTHER, rest)] if rest.any() else found


def _rule(
    overall: _Comparison, slices: Sequence[_Comparison], policy: PromotionPolicy, attempt: int
) -> tuple[Outcome, list[str], int]:
    """Outcome, its reasons (the rule that decided comes first), and the further requests needed."""
    tested = [s for s in slices if s.decides]
    notes = [_untested(s, policy) for s in slices if not s.decides]
    alpha = attempt_alpha(policy.alpha, attempt)
    notes.append(f"alpha: {alpha:.4f} one-sided at attempt {attempt} of a family of {policy.alpha}")
    if attempt > policy.max_verdicts:
        reason = f"max_verdicts: this gate generation has given its {policy.max_verdicts} verdicts; gather a new one"
        return "inconclusive", [reason, *notes], overall.verdict.requests
    if overall.conversations < policy.min_requests:
        missing = policy.min_requests - overall.conversations
        reason = f"min_requests: {overall.conversations} conversations, {policy.min_requests} are needed"
        return "inconclusive", [reason, *notes], missing
    gain, margin = overall.verdict.difference, -policy.slice_margin
    rejecting = [f"slice_margin: {_figures(s)} is below {margin:+.3f}" for s in tested if _high(s) < margin]
    if gain.high < policy.min_gain:
        rejecting.insert(0, f"min_gain: {_figures(overall)} is below {policy.min_gain:+.3f}")
    if rejecting:
        return "reject", [*rejecting, *notes], 0
    doubts, more = _doubts(overall, tested, policy)
    if doubts:
        return "inconclusive", [*doubts, *notes], more
    reasons = [f"min_gain: {_figures(overall)} is above {policy.min_gain:+.3f}"]
    reasons += [f"slice_margin: {_figures(s)} is above {margin:+.3f}" for s in tested]
    return "promote", [*reasons, *notes], 0


def _doubts(overall: _Comparison, tested: Sequence[_Comparison], policy: PromotionPolicy) -> tuple[list[str], int]:
    """What is neither proven nor refuted, and how many further requests in all would settle it."""
    margin, doubts, more = -policy.slice_margin, [], 0
    if not overall.verdict.difference.low > policy.min_gain:
        more = overall.more(policy.min_gain)
        doubts.append(f"min_gain: {_figures(overall)} does not settle {policy.min_gain:+.3f}; {more} more requests")
    for item in tested:
        if item.verdict.difference.low > margin:
            continue
        own = item.more(margin)
        more = max(more, min(math.ceil(own * overall.verdict.requests / item.verdict.requests), MORE_REQUESTS_LIMIT))
        doubts.append(f"slice_margin: {_figures(item)} does not settle {margin:+.3f}; {own} more of this slice")
    return doubts, more


def _high(item: _Comparison) -> float:
    return item.verdict.difference.high


def _figures(item: _Comparison) -> str:
    d, v = item.verdict.difference, item.verdict
    name = v.slice if v.slice == "overall" else f"slice {v.slice}"
    return f"{name} {v.candidate:.3f} against {v.incumbent:.3f}, gain {d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def _untested(item: _Comparison, policy: PromotionPolicy) -> str:
    few = f"{item.verdict.requests} requests, {policy.min_slice_requests} needed"
    return f"min_slice_requests: slice {item.verdict.slice} is too small to be tested ({few})"


def to_markdown(verdict: Verdict) -> str:
    """The verdict as a person reads it."""
    lines = [
        f"## {verdict.outcome}: {verdict.candidate[:12]} against {verdict.incumbent[:12]}",
        "",
        *(f"- {reason}" for reason in verdict.reasons),
        "",
        "| slice | requests | candidate | incumbent | difference | low | high |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for s in (verdict.overall, *verdict.slices):
        d = s.difference
        lines.append(
            f"| {s.slice} | {s.requests} | {s.candidate:.3f} | {s.incumbent:.3f} "
            f"| {d.estimate:+.3f} | {d.low:+.3f} | {d.high:+.3f} |"
        )
    lines += ["", f"Bounds are one-sided at alpha {verdict.alpha:.4f} (attempt {verdict.attempt})."]
    if verdict.detectable_effect is not None:
        lines.append(f"So many requests show a true gain of {verdict.detectable_effect:.3f} four times in five.")
    if verdict.more_requests:
        lines.append(f"About {verdict.more_requests} further requests are needed.")
    return "\n".join(lines)
