"""The promotion rule: candidate and incumbent on the same gate requests, promote, reject or inconclusive, with reasons.

Owns the decision. Knows nothing of stores, drafts or how a report was made; what makes two reports comparable is in
``comparable``, the statistics of each part in ``comparisons``, alpha's families in ``families``, the throughput in
``throughput_guard``, the wording for people in ``verdict_text``. Every figure is in acceptance length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tide.config import PromotionPolicy
from tide.domain import EngineProfile, EvalReport, GateGeneration, SliceVerdict, Verdict
from tide.errors import EvaluationError
from tide.promotion.comparable import check_comparable
from tide.promotion.comparisons import MORE_REQUESTS_LIMIT, Comparison, compare, figures
from tide.promotion.families import attempt_alpha, false_promotions_a_year, family_of, family_rate
from tide.promotion.slices import Paired, slices_of
from tide.promotion.throughput_guard import Guard, guard

Outcome = Literal["promote", "reject", "inconclusive"]


def decide(
    candidate: EvalReport,
    incumbent: EvalReport,
    policy: PromotionPolicy,
    *,
    attempt: int,
    states_commit: str,
    policy_digest: str,
    gate: GateGeneration | None = None,
    profile: EngineProfile | None = None,
    concurrency: Mapping[int, float] | None = None,
) -> Verdict:
    """Whether the candidate may replace the incumbent.

    Args:
        candidate, incumbent: reports on the same requests; see ``baseline_without_draft`` for a first draft.
        attempt: 1 for the first verdict on this gate generation against this incumbent, counting up; each later one
            gets a smaller share of the family's alpha.
        states_commit, policy_digest: what the verdict binds to.
        gate: the generation that the requests are; None when they were not drawn from the service's gate.
        profile, concurrency: what a step costs on the engine, and the service's share of output tokens by number of
            running requests; without them throughput is not checked, which the reasons say.

    Raises:
        EvaluationError: the reports cannot be compared; the message names the part.
        ContractMismatch: they, or the profile, are of two targets.
        ConfigError: the policy has a margin for a slice that there is not.
    """
    check_comparable(candidate, incumbent, states_commit)
    if attempt < 1:
        raise EvaluationError(f"attempt is {attempt}; the first verdict on a gate generation is attempt 1")
    # A generation that is used up decides nothing; its figures are shown as its last verdict's would have been.
    alpha = attempt_alpha(policy.alpha, min(attempt, policy.max_verdicts))
    paired = Paired.of(candidate, incumbent)
    overall = compare("overall", paired, paired.everything(), policy, alpha)
    slices = [compare(name, paired, rows, policy, alpha) for name, rows in slices_of(paired, policy)]
    throughput = guard(candidate, incumbent, overall.verdict, profile, concurrency)
    found = _rule(_Case(overall, slices, throughput, policy, attempt, alpha, gate))
    return Verdict(
        outcome=found.outcome,
        candidate=candidate.draft,
        incumbent=incumbent.draft,
        reasons=tuple(found.reasons),
        overall=found.asking(overall),
        slices=tuple(map(found.asking, slices)),
        alpha=alpha,
        attempt=attempt,
        detectable_effect=overall.verdict.detectable_effect,
        more_requests=found.more,
        states_commit=states_commit,
        policy=policy_digest,
        target=candidate.target,
        definition=candidate.definition,
        sampling=candidate.sampling,
        throughput=throughput.predicted,
        **_family(gate, incumbent.draft, policy),
    )


def _family(gate: GateGeneration | None, incumbent: str, policy: PromotionPolicy) -> dict[str, Any]:
    """Fields of the family that a verdict belongs to."""
    if gate is None:
        return {}
    return {
        "gate": gate,
        "family": family_of(gate.id, incumbent),
        "family_alpha": family_rate(policy.alpha, policy.max_verdicts),
        "false_promotions_a_year": false_promotions_a_year(
            policy.alpha,
            generation_s=gate.until - gate.first,
            cycle_s=policy.cycle_s,
            max_verdicts=policy.max_verdicts,
        ),
    }


@dataclass(frozen=True)
class _Case:
    """All that the rule looks at."""

    overall: Comparison
    slices: Sequence[Comparison]
    throughput: Guard
    policy: PromotionPolicy
    attempt: int
    alpha: float
    gate: GateGeneration | None

    @property
    def tested(self) -> list[Comparison]:
        """Slices large enough to decide."""
        return [s for s in self.slices if s.decides]

    @property
    def exhausted(self) -> bool:
        """Whether the generation has given all its verdicts."""
        used = self.gate.used if self.gate else 0
        return max(used, self.attempt - 1) >= self.policy.max_verdicts


@dataclass(frozen=True)
class _Finding:
    """Outcome, its reasons (the rule that decided comes first), and the further requests needed."""

    outcome: Outcome
    reasons: Sequence[str]
    more: int = 0
    slices: Mapping[str, int] = field(default_factory=dict)
    """Further requests by slice; ``overall`` among them."""

    def asking(self, item: Comparison) -> SliceVerdict:
        """A slice's figures, with the further requests it needs."""
        return item.verdict.model_copy(update={"more_requests": self.slices.get(item.verdict.slice, 0)})


def _rule(case: _Case) -> _Finding:
    notes = [*case.throughput.notes, *_notes(case)]
    if case.exhausted:
        more = case.gate.missing if case.gate else case.overall.verdict.requests
        reason = f"max_verdicts: this gate generation has given its {case.policy.max_verdicts} verdicts"
        return _Finding("inconclusive", [f"{reason}; {more} wholly new gate requests open the next", *notes], more)
    if shortage := _shortage(case):
        return _Finding("inconclusive", [shortage[0], *notes], shortage[1])
    if rejecting := _rejecting(case):
        return _Finding("reject", [*rejecting, *notes])
    doubts, more, by_slice = _doubts(case)
    if doubts:
        return _Finding("inconclusive", [*doubts, *notes], more, by_slice)
    reasons = [f"min_gain: {figures(case.overall)} is above {case.policy.min_gain:+.3f}"]
    reasons += [f"slice_margin: {figures(s)} is above {s.margin:+.3f}" for s in case.tested]
    return _Finding("promote", [*reasons, *notes])


def _shortage(case: _Case) -> tuple[str, int] | None:
    """Why these requests cannot decide at all, and how many are missing."""
    overall, needed = case.overall, case.policy.min_requests
    if overall.conversations < needed:
        reason = f"min_requests: {overall.conversations} conversations, {needed} are needed"
        return reason, needed - overall.conversations
    if overall.uniform:
        gain = overall.verdict.difference.estimate
        return f"no_spread: every conversation shows the same gain of {gain:+.3f}; look how the reports were made", 0
    return None


def _rejecting(case: _Case) -> list[str]:
    found = []
    if case.overall.verdict.difference.high < case.policy.min_gain:
        found.append(f"min_gain: {figures(case.overall)} is below {case.policy.min_gain:+.3f}")
    harmed = [s for s in case.tested if s.verdict.difference.high < s.margin]
    slices = [f"slice_margin: {figures(s)} is below {s.margin:+.3f}" for s in harmed]
    return [*found, *case.throughput.objections, *slices]


def _doubts(case: _Case) -> tuple[list[str], int, dict[str, int]]:
    """What is neither proven nor refuted, and how many further requests would settle it: in all, and of each slice."""
    overall, least = case.overall, case.policy.min_gain
    doubts, total, by_slice = [], 0, {}
    if not overall.verdict.difference.low > least:
        total = by_slice["overall"] = overall.more(least)
        doubts.append(f"min_gain: {figures(overall)} does not settle {least:+.3f}; {total} more requests")
    for item in case.tested:
        if item.verdict.difference.low > item.margin:
            continue
        own = by_slice[item.verdict.slice] = item.more(item.margin)
        total = max(total, min(math.ceil(own * overall.verdict.requests / item.verdict.requests), MORE_REQUESTS_LIMIT))
        doubts.append(f"slice_margin: {figures(item)} does not settle {item.margin:+.3f}; {own} more of this slice")
    return doubts, total, by_slice


def _notes(case: _Case) -> list[str]:
    notes = [_untested(s, case.policy) for s in case.slices if not s.decides]
    if case.gate:
        share = f"{case.gate.requests} requests, {case.gate.used} verdicts before this one"
        notes.append(f"gate: generation {case.gate.id[:12]}: {share}")
    family = f"one-sided at attempt {case.attempt} of a family of {case.policy.alpha}"
    return [*notes, f"alpha: {case.alpha:.4f} {family}"]


def _untested(item: Comparison, policy: PromotionPolicy) -> str:
    few = f"{item.verdict.requests} requests, {policy.min_slice_requests} needed"
    return f"min_slice_requests: slice {item.verdict.slice} is too small to be tested ({few})"
