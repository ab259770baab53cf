"""The adapt flow: the order of its stages, and what is left out when an earlier one says no or is enough."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from flows import adapt as module
from tests.support.reports import TARGET
from tests.support.signed import verdict_on
from tide.cycles import Cycle
from tide.domain import DriftReport, Promotion, Snapshot, Verdict

A, B, C = "a" * 64, "b" * 64, "c" * 64
SNAPSHOT = Snapshot(
    repository="svc-states", commit="5" * 64, target=TARGET, windows=(), shards=1, requests=1, rows=1, drafts=()
)
PROMOTED = Promotion(kind="promotion", generation=3, draft=B, previous=A, verdict=None, replicas=(), at=1.0)


def drift(decision: Literal["none", "watch", "retrain"] = "retrain", *reasons: str) -> DriftReport:
    cause: Any = "drift" if decision == "retrain" else None
    return DriftReport(
        decision=decision,
        cause=cause,
        reasons=reasons or ("a reason",),
        figures={},
        incumbent=A,
        states_commit="5" * 64,
    )


class Stages:
    """Stand-ins for the stages, and the order in which they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.called: list[str] = []
        self.answers: dict[str, Any] = {
            "harvest_spool": None,
            "pin_snapshot": SNAPSHOT,
            "finished_cycle": None,
            "finish_cycle": None,
            "detect_drift": drift(),
            "check_engine": None,
            "look_in_pool": None,
            "weigh_cost": drift("retrain", "a reason", "cost: off"),
            "request_training": "candidate-trained",
        } | answers
        self.promoted: dict[str, Promotion | None] = {"candidate-trained": PROMOTED}
        for name in self.answers:
            monkeypatch.setattr(module, name, self._stage(name))
        monkeypatch.setattr(module, "promote", self._promote)

    def _stage(self, name: str) -> Any:
        def called(*_: object) -> Any:
            self.called.append(name)
            # The engine check lets a report pass as it is, unless a test says otherwise.
            return (
                self.answers["detect_drift"]
                if (name, self.answers[name]) == ("check_engine", None)
                else self.answers[name]
            )

        return called

    def _promote(self, branch: str, _commit: str) -> tuple[Verdict, Promotion | None]:
        self.called.append(f"promote {branch}")
        promotion = self.promoted.get(branch)
        return verdict_on(B, A, "promote" if promotion else "reject"), promotion


LOOKED = ["harvest_spool", "pin_snapshot", "finished_cycle", "detect_drift", "check_engine"]
FORCED = ["harvest_spool", "pin_snapshot", "detect_drift", "check_engine"]


def test_a_retrain_asks_the_pool_then_what_it_costs_then_trains_and_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch)
    result = module.adapt.fn()
    wanted = ["look_in_pool", "weigh_cost", "request_training", "promote candidate-trained"]
    assert stages.called == [*LOOKED, *wanted, "finish_cycle"]
    assert (result.candidate_branch, result.promotion) == ("candidate-trained", PROMOTED)
    assert result.drift.reasons[-1] == "cost: off"


@pytest.mark.parametrize("decision", ["none", "watch"])
def test_without_a_retrain_nothing_else_is_asked(monkeypatch: pytest.MonkeyPatch, decision: Any) -> None:
    stages = Stages(monkeypatch, detect_drift=drift(decision))
    result = module.adapt.fn()
    assert stages.called == [*LOOKED, "finish_cycle"]
    assert (result.candidate_branch, result.verdict) == (None, None)


def test_a_loss_that_is_the_engines_ends_the_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = Stages(monkeypatch, check_engine=drift("watch", "engine: the walk has what it had"))
    result = module.adapt.fn()
    assert stages.called == [*LOOKED, "finish_cycle"]
    assert (result.drift.decision, result.promotion) == ("watch", None)


def test_a_draft_of_the_pool_that_is_promoted_spares_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, look_in_pool="candidate-pool")
    stages.promoted["candidate-pool"] = PROMOTED
    result = module.adapt.fn()
    assert stages.called == [*LOOKED, "look_in_pool", "promote candidate-pool", "finish_cycle"]
    assert (result.candidate_branch, result.promotion) == ("candidate-pool", PROMOTED)


def test_a_draft_of_the_pool_that_the_gate_refuses_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, look_in_pool="candidate-pool")
    result = module.adapt.fn()
    judged = ["promote candidate-pool", "weigh_cost", "request_training", "promote candidate-trained"]
    assert stages.called == [*LOOKED, "look_in_pool", *judged, "finish_cycle"]
    assert result.candidate_branch == "candidate-trained"


def test_a_retrain_that_does_not_pay_ends_the_cycle_as_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, weigh_cost=drift("watch", "cost: does not pay"), look_in_pool="candidate-pool")
    result = module.adapt.fn()
    assert stages.called == [*LOOKED, "look_in_pool", "promote candidate-pool", "weigh_cost", "finish_cycle"]
    assert (result.drift.decision, result.promotion) == ("watch", None)
    assert result.verdict is not None, "what the gate said of the pool's draft is not lost"
    assert result.candidate_branch == "candidate-pool"


def test_states_that_an_earlier_cycle_worked_through_are_not_worked_through_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = Cycle(states_commit="5" * 64, policy="p", drift=drift("watch"), candidate_branch="candidate-before")
    stages = Stages(monkeypatch, finished_cycle=earlier)
    result = module.adapt.fn()
    assert stages.called == ["harvest_spool", "pin_snapshot", "finished_cycle"]
    assert (result.drift.decision, result.candidate_branch) == ("watch", "candidate-before")


@pytest.mark.parametrize("decision", ["none", "watch", "retrain"])
def test_force_trains_and_asks_neither_the_pool_nor_the_cost(monkeypatch: pytest.MonkeyPatch, decision: Any) -> None:
    stages = Stages(monkeypatch, detect_drift=drift(decision))
    module.adapt.fn(force=True)
    assert stages.called == [*FORCED, "request_training", "promote candidate-trained", "finish_cycle"]
