"""The adapt flow: the order of its stages, and what is left out when an earlier one says no or is enough."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from flows import adapt as module
from tests.support.reports import TARGET
from tests.support.signed import verdict_on
from tide.cycles import Cycle
from tide.domain import DriftReport, Proposal, Snapshot

A, B, C = "a" * 64, "b" * 64, "c" * 64
SNAPSHOT = Snapshot(
    repository="svc-states", commit="5" * 64, target=TARGET, windows=(), shards=1, requests=1, rows=1, drafts=()
)
RUN = "0b6f1c1e-7a53-4a0e-9a51-0f6a5d1f2c33"


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
            "set_capture_rate": None,
            "look_in_pool": None,
            "weigh_cost": drift("retrain", "a reason", "cost: off"),
            "request_training": "candidate-trained",
        } | answers
        self.better = {"candidate-trained"}
        self.started: list[tuple[Proposal, str]] = []
        for name in self.answers:
            monkeypatch.setattr(module, name, self._stage(name))
        self.held: dict[str, Proposal] = {}
        monkeypatch.setattr(module, "find_proposal", self.held.get)
        monkeypatch.setattr(module, "judge", self._judge)
        monkeypatch.setattr(module, "start_promotion", self._start)

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

    def _judge(self, branch: str, _commit: str) -> Proposal:
        self.called.append(f"judge {branch}")
        verdict = verdict_on(B, A, "promote" if branch in self.better else "reject")
        return Proposal(branch=branch, verdict=verdict, generation=2)

    def _start(self, proposal: Proposal, states_ref: str) -> str:
        self.called.append(f"start {proposal.branch}")
        self.started.append((proposal, states_ref))
        return RUN


LOOKED = ["harvest_spool", "pin_snapshot", "finished_cycle", "detect_drift", "check_engine", "set_capture_rate"]
FORCED = [stage for stage in LOOKED if stage != "finished_cycle"]


def test_a_retrain_asks_the_pool_then_what_it_costs_then_trains_and_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch)
    result = module.adapt.fn()
    wanted = ["look_in_pool", "weigh_cost", "request_training", "judge candidate-trained", "start candidate-trained"]
    assert stages.called == [*LOOKED, *wanted, "finish_cycle"]
    assert (result.candidate_branch, result.promote_run) == ("candidate-trained", RUN)
    assert [states for _, states in stages.started] == [SNAPSHOT.commit]
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
    assert (result.drift.decision, result.promote_run) == ("watch", None)


def test_a_draft_of_the_pool_that_the_gate_takes_spares_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, look_in_pool="candidate-pool")
    stages.better.add("candidate-pool")
    result = module.adapt.fn()
    assert stages.called == [*LOOKED, "look_in_pool", "judge candidate-pool", "start candidate-pool", "finish_cycle"]
    assert (result.candidate_branch, result.promote_run) == ("candidate-pool", RUN)


def test_a_draft_of_the_pool_that_the_gate_refuses_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, look_in_pool="candidate-pool")
    result = module.adapt.fn()
    judged = ["judge candidate-pool", "weigh_cost", "request_training", "judge candidate-trained"]
    assert stages.called == [*LOOKED, "look_in_pool", *judged, "start candidate-trained", "finish_cycle"]
    assert result.candidate_branch == "candidate-trained"


def test_a_retrain_that_does_not_pay_ends_the_cycle_as_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, weigh_cost=drift("watch", "cost: does not pay"), look_in_pool="candidate-pool")
    result = module.adapt.fn()
    assert stages.called == [*LOOKED, "look_in_pool", "judge candidate-pool", "weigh_cost", "finish_cycle"]
    assert (result.drift.decision, result.promote_run) == ("watch", None)
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
    assert stages.called == [
        *FORCED,
        "request_training",
        "judge candidate-trained",
        "start candidate-trained",
        "finish_cycle",
    ]


def test_a_candidate_that_the_gate_refuses_starts_no_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch)
    stages.better.clear()
    result = module.adapt.fn()
    assert stages.called[-2:] == ["judge candidate-trained", "finish_cycle"]
    assert result.verdict is not None
    assert (result.verdict.outcome, result.promote_run) == ("reject", None)


def test_a_cycle_that_was_killed_after_its_verdict_does_not_judge_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch)
    held = Proposal(branch="candidate-trained", verdict=verdict_on(B, A), generation=2)
    stages.held["candidate-trained"] = held
    module.adapt.fn()
    assert "judge candidate-trained" not in stages.called
    assert stages.started == [(held, SNAPSHOT.commit)]
