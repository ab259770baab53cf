"""Our rules in the replay: the cycle of flows/adapt.py on simulated time, by the real drift, pool, cost and promotion.

Owns the order of the rules and what is counted. Knows nothing of the other policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tests.bench.decisions.replay import Service, Setting
from tests.bench.decisions.reports import digest_of, report_of
from tests.support.drafts import draft_config, draft_tensors
from tests.support.reports import TARGET
from tide.config import CostPolicy, Policy
from tide.domain import DraftModel, DriftReport, Verdict
from tide.drift import rule as drift
from tide.drift.baseline import Baseline
from tide.models import pool
from tide.models.draft_files import read_contract
from tide.promotion import rule as promotion
from tide.states.request_stats import RequestStats
from tide.throughput import cost

COUNTS = ("retrains", "pool_proposed", "pool_promoted", "cost_refused", "promoted", "gate_refused")


@dataclass
class Ours:
    """The cycle of flows/adapt.py, one look a window; a training that runs is waited for as the flow waits for it."""

    service: Service
    policy: Policy
    baseline: Baseline | None = None
    previous: DriftReport | None = None
    asked: DriftReport | None = None
    drifts: list[DriftReport] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def run(self) -> dict[str, int]:
        while not self.service.done:
            stats = self.service.serve()
            if made := self.service.finished():
                self._judge_trained(made[0])
            elif not self.service.training:
                self._look(stats)
        return self.counts

    def _look(self, stats: RequestStats) -> None:
        incumbent, commit = _model(self.service.serving), f"window-{self.service.served}"
        if self.baseline is None:
            self.baseline = drift.freeze_baseline(stats, self.policy.drift, draft=incumbent.digest)
        report = drift.decide(
            self.baseline,
            drift.window_of(stats, self.policy.drift, incumbent=incumbent, previous=self.previous),
            self.policy.drift,
            incumbent=incumbent,
            trained_tokens_available=0,
            previous=self.previous,
            states_commit=commit,
        )
        self.previous = report
        self.drifts.append(report)
        if report.decision != "retrain":
            return
        self.counts["retrains"] += 1
        if pool.wanted(report) and self._from_pool(commit):
            return
        if self._pays(report, stats):
            self.asked = report
            self.service.train()
        else:
            self.counts["cost_refused"] += 1

    def _from_pool(self, commit: str) -> bool:
        service, serving = self.service, self.service.serving
        members = [d for d in dict.fromkeys(reversed(service.history)) if d != serving][: self.policy.pool_drafts]
        chosen = service.newest(service.traffic.selection, self.policy.selection_requests)
        choice = pool.choose(
            self._report(serving, chosen, commit),
            [self._report(name, chosen, commit) for name in members],
            self.policy.promotion.min_gain,
        )
        if choice.chosen is None:
            return False
        self.counts["pool_proposed"] += 1
        name = next(name for name in members if digest_of(name) == choice.chosen)
        if self._judge(name, commit).outcome != "promote":
            return False
        self.counts["pool_promoted"] += 1
        self._promote(name)
        return True

    def _pays(self, report: DriftReport, stats: RequestStats) -> bool:
        setting, measured = self.service.setting, stats.take(stats.measured)
        span = float(stats.finished_at[-1] - stats.finished_at[0])
        tokens = float(stats.response_tokens.sum())
        traffic = cost.Traffic(
            tokens_per_s=tokens / span,
            engine_s_per_token=span / tokens,
            proposed_per_step=float(measured.proposed.sum() / measured.verify_steps.sum()),
        )
        decision = cost.decide(
            report,
            cost_policy(setting),
            traffic,
            cost.history(self.drifts, self.verdicts, traffic.proposed_per_step),
            steps=setting.steps,
            profile=setting.profile,
            concurrency={setting.concurrency: 1.0},
        )
        return cost.amend(report, decision).decision == "retrain"

    def _judge_trained(self, draft: str) -> None:
        assert self.asked is not None
        verdict = self._judge(draft, self.asked.states_commit)
        self.verdicts.append(verdict)
        if verdict.outcome == "promote":
            self.counts["promoted"] += 1
            self._promote(draft)
        else:
            self.counts["gate_refused"] += 1

    def _judge(self, draft: str, commit: str) -> Verdict:
        service = self.service
        numbers = service.newest(service.traffic.gate, self.policy.gate_requests)
        family = (service.serving, int(service.traffic.gate[: service.served].sum()) // self.policy.gate_requests)
        self.attempts[family] = self.attempts.get(family, 0) + 1
        return promotion.decide(
            self._report(draft, numbers, commit),
            self._report(service.serving, numbers, commit),
            self.policy.promotion,
            attempt=self.attempts[family],
            states_commit=commit,
            policy_digest=self.policy.digest(),
        )

    def _report(self, draft: str, numbers: Any, commit: str) -> Any:
        return report_of(draft, self.service.setting.scores[draft], self.service.traffic.rows[numbers], commit, numbers)

    def _promote(self, draft: str) -> None:
        self.service.swap(draft)
        self.baseline = self.previous = None


def ours(service: Service) -> dict[str, Any]:
    return dict(Ours(service, Policy()).run())


def cost_policy(setting: Setting) -> CostPolicy:
    """A training costs what it takes on one device of the engine's price. A draft serves whenever its workload comes
    back, the pool sees to that: the horizon is the time for which one workload is served in all."""
    windows = setting.phases * sum(setting.phase_windows) / 2 / len(setting.workloads)
    horizon = windows * setting.window_s
    return CostPolicy(training_cost=setting.training_seconds, horizon=horizon)


@lru_cache
def _model(draft: str) -> DraftModel:
    contract = read_contract(draft_config(), draft_tensors(draft_config())["d2t"])
    return DraftModel(
        digest=digest_of(draft), contract=contract, target=TARGET, states_commit="corpus", trained_tokens=10**9
    )
