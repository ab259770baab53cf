"""The promote flow: the order of its stages, and what it does when another promotion is faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows import promote as module
from tests.support.signed import verdict_on
from tide.domain import CanaryLease, CanaryRefusal, CanaryReport, Promotion, Serving, ServingDraft
from tide.errors import Conflict

A, B, C = "a" * 64, "b" * 64, "c" * 64
REFUSED = CanaryRefusal(
    generation=2,
    previous=A,
    lease=CanaryLease(draft=B, verdict="f" * 64, replicas=("r0",), run="host/1/1", lease_until=2.0),
    report=CanaryReport(outcome="regression", reasons=("worse",)),
    replicas=(),
    at=1.0,
)
PROMOTED = Promotion(kind="promotion", generation=3, draft=B, previous=C, verdict=None, replicas=(), at=1.0)


class Stages:
    """Stand-ins for the stages: what serves by turn, what the rollout answers by turn, and what was judged."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, serving: list[Serving], answers: list[Promotion | CanaryRefusal | None]
    ) -> None:
        self.serving, self.answers = serving, answers
        self.judged: list[str] = []
        self.rolled_out: list[int] = []
        stages: dict[str, Any] = {
            "pin_snapshot": lambda _ref: SimpleNamespace(commit="5" * 64),
            "fetch_candidate": lambda _branch: SimpleNamespace(digest=B),
            "fetch_gate": lambda *_: (None, ()),
            "fetch_incumbent": lambda: self.serving.pop(0),
            "walk_draft": lambda digest, *_: digest,
            "decide_promotion": self.decide,
            "roll_out": self.roll_out,
        }
        for name, stage in stages.items():
            monkeypatch.setattr(module, name, stage)

    def decide(self, _branch: str, ours: str, theirs: str | None, _snapshot: object, _gate: object) -> object:
        self.judged.append(theirs or "none")
        return verdict_on(ours, theirs or "none", self.outcome)

    outcome: Any = "promote"

    def roll_out(self, _branch: str, _digest: str, generation: int) -> Promotion | CanaryRefusal | None:
        self.rolled_out.append(generation)
        return self.answers.pop(0)


def at(generation: int, digest: str) -> Serving:
    return Serving(generation=generation, stable=ServingDraft(digest=digest))


def test_a_lost_race_is_judged_again_against_the_draft_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A), at(2, C)], [None, PROMOTED])
    verdict, promotion = module.promote.fn("candidate-b")
    assert stages.judged == [A, C]
    assert stages.rolled_out == [1, 2]
    assert (verdict.incumbent, promotion) == (C, PROMOTED)


def test_a_candidate_that_the_canary_refuses_ends_the_flow_well_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [REFUSED])
    verdict, promotion = module.promote.fn("candidate-b")
    assert (verdict.outcome, promotion, stages.rolled_out) == ("promote", None, [1])


def test_a_race_lost_again_and_again_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(n, A) for n in range(9)], [None] * 9)
    with pytest.raises(Conflict, match="faster 3 times"):
        module.promote.fn("candidate-b")
    assert len(stages.rolled_out) == 3


@pytest.mark.parametrize("outcome", ["reject", "inconclusive"])
def test_a_verdict_that_is_no_promote_ends_the_flow_well(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [])
    stages.outcome = outcome
    verdict, promotion = module.promote.fn("candidate-b")
    assert (verdict.outcome, promotion, stages.rolled_out) == (outcome, None, [])


def test_a_dry_run_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, [at(1, A)], [])
    verdict, promotion = module.promote.fn("candidate-b", dry_run=True)
    assert (verdict.outcome, promotion, stages.rolled_out) == ("promote", None, [])
