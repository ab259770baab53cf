"""The engine check as a stage: what is walked before a drift retrain, and what is written down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import engine_check as stage
from tests.support.reports import TARGET
from tests.support.tiny import conversation
from tests.support.traffic_stats import DRAFT, draft_model, join, make_stats
from tide.config import DriftPolicy, Policy
from tide.domain import DriftReport, RequestScore, Shard, ShardRequest, Snapshot, Split
from tide.errors import EvaluationError

AFTER = 1_000.0
SNAPSHOT = Snapshot(
    repository="r", commit="c" * 64, target=TARGET, windows=(), shards=1, requests=1, rows=1, drafts=()
)  # fmt: skip


def report(decision: Any = "retrain", cause: Any = "drift", **figures: float) -> DriftReport:
    return DriftReport(
        decision=decision, cause=cause, reasons=("cusum: it fell",), figures={"window_from": AFTER, **figures},
        incumbent=DRAFT, states_commit="c",
    )  # fmt: skip


class Served:
    """A window of requests whose acceptance fell, of which some were held out; the walk answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.window = make_stats(60, seed=3, rate=0.2, start=AFTER)
        self.rate: float | None = 0.4
        self.fetched: list[str] = []
        self.recorded: list[DriftReport] = []
        policy = Policy(drift=DriftPolicy(baseline_requests=100, engine_requests=20), gate_requests=50)
        config = SimpleNamespace(policy=lambda: policy, drafts_repository="d", bundle=tmp_path)
        monkeypatch.setattr(stage, "wiring", SimpleNamespace(
            settings=lambda: config, store=lambda _config: None, evaluator=lambda: self
        ))  # fmt: skip
        monkeypatch.setattr(stage, "serving_draft", draft_model)
        monkeypatch.setattr(stage, "drafting", lambda: {"steps": 3, "topk": 1, "draft_tokens": None})
        monkeypatch.setattr(stage, "request_stats", lambda *_: join(make_stats(100, seed=1), self.window))
        monkeypatch.setattr(stage, "record", lambda found, _: self.recorded.append(found))
        monkeypatch.setattr(stage, "cache_folder", lambda kind: tmp_path / kind)
        monkeypatch.setattr(stage.rollout, "install_draft", lambda *_: None)
        monkeypatch.setattr(stage.snapshots, "manifests", lambda *_: self.held_out())
        monkeypatch.setattr(stage.snapshots, "fetch", self.fetch)

    def held_out(self) -> list[tuple[str, Shard]]:
        gate, selection = conversation("a", Split.GATE), conversation("b", Split.SELECTION)
        names = self.window.request.tolist()
        return [
            ("old", self.shard("0", ["of another window"], gate)),
            ("gate", self.shard("1", names[:15], gate)),
            ("selection", self.shard("2", names[15:30], selection)),
        ]

    def shard(self, name: str, requests: list[str], talk: str) -> Shard:
        infos = tuple(ShardRequest(request=r, conversation=talk, slice="chat", draft=DRAFT) for r in requests)
        return Shard(
            name=name * 64, split="held_out", target=TARGET, rows=1, size=1, requests=infos, opened_at=0.0,
            closed_at=float(name),
        )  # fmt: skip

    def fetch(self, _store: object, _repository: str, _commit: str, chosen: Any, _to: Path) -> list[Path]:
        self.fetched += [path for path, _ in chosen]
        return [Path(path) for path, _ in chosen]

    def evaluate(self, _draft: Path, shards: list[Path], *, split: Split, **_: Any) -> Any:
        if self.rate is None:
            raise EvaluationError("nothing to walk")
        rows = range(15) if split is Split.GATE else range(15, 30)
        return SimpleNamespace(scores=[self.score(i, self.rate) for i in rows])

    def score(self, row: int, rate: float) -> RequestScore:
        steps, proposed = int(self.window.verify_steps[row]), int(self.window.proposed[row])
        return RequestScore(
            request=str(self.window.request[row]), conversation=f"c{row}", slice="chat", tokens=2 * steps,
            verify_steps=steps, proposed=proposed, accepted=round(rate * proposed),
        )  # fmt: skip


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Served:
    return Served(monkeypatch, tmp_path)


def test_the_windows_own_requests_of_both_held_out_splits_are_walked(served: Served) -> None:
    found = stage.check_engine.fn(SNAPSHOT, report())
    assert served.fetched == ["gate", "selection"]
    assert (found.decision, found.cause, found.figures["engine_requests"]) == ("watch", "engine", 30)
    assert served.recorded == [found]


def test_a_walk_that_lost_as_well_lets_the_retrain_go_on(served: Served) -> None:
    served.rate = 0.2
    found = stage.check_engine.fn(SNAPSHOT, report())
    assert (found.decision, found.cause) == ("retrain", "drift")
    assert any(reason.startswith("traffic") for reason in found.reasons)


def test_a_walk_that_cannot_be_made_is_said_and_stops_nothing(served: Served) -> None:
    served.rate = None
    found = stage.check_engine.fn(SNAPSHOT, report())
    assert found.decision == "retrain"
    assert "engine unchecked on gate: nothing to walk" in found.reasons


@pytest.mark.parametrize(("decision", "cause"), [("none", None), ("watch", None), ("retrain", "headroom")])
def test_nothing_is_walked_or_recorded_for_other_reports(served: Served, decision: str, cause: str | None) -> None:
    before = report(decision, cause)
    assert stage.check_engine.fn(SNAPSHOT, before) is before
    assert served.fetched == []
    assert served.recorded == []


def test_the_loss_is_looked_into_from_where_it_began(served: Served) -> None:
    """A slow loss fills many windows: the requests of all of them speak, not only the last window's."""
    found = stage.check_engine.fn(SNAPSHOT, report(window_from=AFTER + 51, loss_since=AFTER))
    assert found.figures["engine_requests"] == 30
