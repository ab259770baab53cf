"""The canary's decision: whether a candidate that serves on one replica has shown itself worse than the incumbent.

Owns the test and the rule. Pure: rates of requests in, report out. Knows nothing of replicas, of spools, or of who
serves.

Both tests are sequential and nonasymptotic, so that one may look after every request. A loss is the incumbent's rate
minus the candidate's on the same request, in [-1, 1]; the hypothesis is that its mean, given what came before, is at
most the margin. Wealth starts at 1 and is multiplied by 1 + bet (loss - margin) with a bet chosen before the loss is
seen: under the hypothesis a nonnegative supermartingale, so that it ever reaches 1/alpha with a chance of at most alpha
(Ville's inequality). That is testing by betting: Waudby-Smith and Ramdas, "Estimating means of bounded random variables
by betting", JRSS B 86 (2024), Theorem 3 and, for the bets, their aGRAPA (section B.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide.domain import CanaryReport
from tide.policies import CanaryPolicy

EXPECTED_LOSS, EXPECTED_VARIANCE, EXPECTED_WEIGHT = 0.1, 0.02, 10.0
"""What the bets assume before anything is seen, as so many requests: a loss beyond the margin that is worth a rollback,
and the spread of one request's difference. A wrong guess costs requests, never the error rate."""
MOST_STAKED = 0.95
"""Share of the wealth that a bet risks at most: the worst loss must not end the test."""


@dataclass(frozen=True)
class Compared:
    """Acceptance rates (accepted over proposed, 0 to 1) of one request that the candidate served."""

    live: float
    """As the engine counted it."""
    candidate: float
    """As the candidate's walk over the logged states has it."""
    incumbent: float | None
    """As the incumbent's walk has it; None before the first promotion."""


def evidence(losses: Sequence[float], margin: float) -> tuple[float, ...]:
    """Wealth after each loss: evidence that the mean loss exceeds the margin.

    Args:
        losses: in [-1, 1], in the order in which they were seen.
    """
    wealth, seen, squares, found = 1.0, EXPECTED_WEIGHT * EXPECTED_LOSS, EXPECTED_WEIGHT * EXPECTED_VARIANCE, []
    for count, loss in enumerate(losses):
        beyond = loss - margin
        mean = seen / (EXPECTED_WEIGHT + count)
        variance = squares / (EXPECTED_WEIGHT + count)
        bet = min(max(mean, 0.0) / (variance + mean**2), MOST_STAKED / (1 + margin))
        wealth *= 1 + bet * beyond
        found.append(wealth)
        squares += (beyond - mean) ** 2
        seen += beyond
    return tuple(found)


def crossed(wealth: Sequence[float], alpha: float) -> int | None:
    """Requests after which the hypothesis was refused; None: it was not."""
    return next((count for count, w in enumerate(wealth, start=1) if w >= 1 / alpha), None)


def decide(
    compared: Sequence[Compared], served: Sequence[float], policy: CanaryPolicy, *, elapsed_s: float
) -> CanaryReport | None:
    """What follows from what was seen so far; None: watch on.

    Args:
        compared: requests with live rate and walks, in the order in which they were compared.
        served: live rates of all requests that the candidate served wholly, with states or without.
        elapsed_s: seconds since the watch began.
    """
    losses = [c.incumbent - c.live for c in compared if c.incumbent is not None]
    regression, engine = (
        evidence(losses, policy.margin),
        evidence([c.candidate - c.live for c in compared], policy.margin),
    )
    figures = _figures(compared, served, regression, engine, elapsed_s)
    if len(served) >= policy.dead_requests and not any(served):
        return _report(
            "dead", f"no proposed token was accepted in {len(served)} requests: the draft does nothing", figures
        )
    if after := crossed(engine, policy.engine_alpha):
        return _report(
            "engine",
            f"after {after} requests the engine accepts {figures['live']:.3f} of what the candidate proposes, its walk "
            f"over the same states {figures['candidate_walk']:.3f}: the engine loses it, not the draft",
            figures,
        )
    if after := crossed(regression, policy.alpha):
        return _report(
            "regression",
            f"after {after} requests the candidate's acceptance rate is {figures['live']:.3f}, the incumbent's walk on "
            f"the same requests {figures['incumbent_walk']:.3f}: more than {policy.margin:g} below it",
            figures,
        )
    if len(compared) >= policy.max_requests:
        return _report("passed", f"no regression in {len(compared)} requests", figures)
    if elapsed_s >= policy.wait_s:
        return _report("passed", _when_time_is_over(len(compared), len(served), policy), figures)
    return None


def _when_time_is_over(compared: int, served: int, policy: CanaryPolicy) -> str:
    seen = f"{compared} requests compared of {served} served in {policy.wait_s:g} s"
    if compared >= policy.min_requests:
        return f"no regression: {seen}"
    return f"little traffic: {seen}, fewer than {policy.min_requests}; nothing was seen against the candidate"


def _report(outcome: str, reason: str, figures: dict[str, float | None]) -> CanaryReport:
    return CanaryReport.model_validate({"outcome": outcome, "reasons": (reason,), "figures": figures})


def _figures(
    compared: Sequence[Compared],
    served: Sequence[float],
    regression: Sequence[float],
    engine: Sequence[float],
    elapsed_s: float,
) -> dict[str, float | None]:
    return {
        "requests": float(len(compared)),
        "served": float(len(served)),
        "live": _mean([c.live for c in compared]),
        "candidate_walk": _mean([c.candidate for c in compared]),
        "incumbent_walk": _mean([c.incumbent for c in compared if c.incumbent is not None]),
        "regression_evidence": max(regression, default=None),
        "engine_evidence": max(engine, default=None),
        "seconds": round(elapsed_s, 3),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
