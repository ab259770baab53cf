"""The stages around the promotion gate: which requests it judges on, how attempts are counted, what is recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import evaluate
from tests.fakes.memory_store import MemoryStore
from tests.support.reports import CANDIDATE, INCUMBENT, TARGET, paired_reports
from tests.support.signed import KEY
from tests.unit.test_snapshots import put
from tide import repositories, wiring
from tide.config import Policy, Settings
from tide.domain import EvalReport, GateGeneration, Serving, ServingDraft, Snapshot, Split, Verdict
from tide.lineage import ledger
from tide.serving.serving_file import draft_prefix, read_signed_verdict

STATES, DRAFTS = "svc-states", "svc-drafts"
BRANCH = "candidate-1"
SNAPSHOT = Snapshot(
    repository=STATES, commit="commit", target=TARGET, windows=(), shards=0, requests=0, rows=0, drafts=()
)
GATE = GateGeneration(id="ab" * 32, first=0.0, until=7200.0, requests=60)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store with a branch for the candidate; artifacts go nowhere."""
    store, config = MemoryStore(), Settings(service="svc", home=tmp_path, _env_file=None)  # type: ignore[call-arg]
    store.create_repository(STATES)
    repositories.ensure_drafts(store, DRAFTS)
    store.create_branch(DRAFTS, BRANCH, "main")
    for name, value in {"settings": lambda: config, "store": lambda _: store, "signing_key": lambda _: KEY}.items():
        monkeypatch.setattr(wiring, name, value)
    monkeypatch.setattr(evaluate, "publish_verdict", lambda _: None)
    return store


def decide(candidate: EvalReport, incumbent: EvalReport | None, gate: GateGeneration | None = GATE) -> Verdict:
    return evaluate.decide_promotion.fn(BRANCH, candidate, incumbent, SNAPSHOT, gate)


def again(report: EvalReport, draft: str) -> EvalReport:
    return report.model_copy(update={"draft": draft})


def test_each_verdict_of_a_family_is_a_further_attempt_and_another_incumbent_starts_a_new_one(
    store: MemoryStore,
) -> None:
    ours, theirs = paired_reports({"chat": 0.06}, 40)
    first, second = decide(ours, theirs), decide(ours, theirs)
    other = decide(ours, again(theirs, "9" * 64))
    third = decide(again(ours, "8" * 64), theirs)
    assert [v.attempt for v in (first, second, other, third)] == [1, 2, 1, 3]
    assert [v.gate.used for v in (first, second, other, third) if v.gate] == [0, 1, 2, 3]
    assert second.alpha == pytest.approx(first.alpha / 4)
    assert first.family == second.family == third.family != other.family
    assert len(ledger.every(store, DRAFTS, "verdict", Verdict)) == 4


def test_a_generation_gives_ten_verdicts_whatever_the_incumbents_and_then_none(store: MemoryStore) -> None:
    ours, theirs = paired_reports({"chat": 0.4}, 40)
    found = [decide(ours, again(theirs, f"{i % 3:064x}")) for i in range(11)]
    assert [v.outcome for v in found] == ["promote"] * 10 + ["inconclusive"]
    assert found[-1].reasons[0].startswith("max_verdicts: ")


def test_the_verdict_lies_signed_and_readable_beside_the_candidate_and_in_the_ledger(store: MemoryStore) -> None:
    ours, theirs = paired_reports({"chat": 0.4}, 40)
    found = decide(ours, theirs)
    prefix = draft_prefix(CANDIDATE)
    page = store.read(DRAFTS, BRANCH, f"{prefix}verdict.html")
    assert found.outcome.encode() in page
    names = {i.path.partition(".")[2]: i.path for i in store.list(DRAFTS, ledger.BRANCH, ledger.ROOT)}
    assert names.keys() == {"html", "json", "sig"}
    assert store.read(DRAFTS, ledger.BRANCH, names["html"]) == page
    assert read_signed_verdict(store, DRAFTS, BRANCH, CANDIDATE).payload == found.to_json()
    for name, report in (("evaluation.json", ours), ("incumbent.json", theirs)):
        assert EvalReport.model_validate_json(store.read(DRAFTS, BRANCH, prefix + name)) == report


def test_a_first_draft_is_judged_against_no_draft(store: MemoryStore) -> None:
    ours, _ = paired_reports({"chat": 0.4}, 40)
    found = decide(ours, None)
    assert found.incumbent == "none"
    assert not [i for i in store.list(DRAFTS, BRANCH) if i.path.endswith("incumbent.json")]


def test_verdicts_outside_the_services_gate_are_no_attempts_of_a_family(store: MemoryStore) -> None:
    ours, theirs = paired_reports({"chat": 0.06}, 40)
    outside, first = decide(ours, theirs, None), decide(ours, theirs)
    assert (outside.attempt, outside.family, first.attempt) == (1, "", 1)


def test_the_gates_shards_are_those_of_the_generation(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "policy", lambda _: Policy(gate_requests=2))
    made = [put(store, tmp_path / "made", f"w{i}", Split.GATE, seed=i) for i in (1, 2, 3)]
    made.append(put(store, tmp_path / "made", "w4", Split.TRAIN, seed=4))
    commit = store.commit(STATES, "main", "harvest", {}).id
    snapshot = SNAPSHOT.model_copy(update={"commit": commit})
    serving = Serving(generation=1, stable=ServingDraft(digest=INCUMBENT))
    generation, local = evaluate.fetch_gate.fn(snapshot, CANDIDATE, serving)
    held = [shard for shard in made[:3] if any(path.name == shard.file for path in local)]
    assert len(local) == len(held)
    assert generation.requests <= sum(len(s.requests) for s in held)


def test_the_engines_profile_and_load_reach_the_gate(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def watch(*_: object, **options: Any) -> None:
        seen.update(options)
        raise SystemExit

    profile = SimpleNamespace(name="profile")
    monkeypatch.setattr(evaluate, "profile_for", lambda _target, steps: profile if steps == 3 else None)
    monkeypatch.setattr(evaluate, "load_of", lambda _snapshot: SimpleNamespace(concurrency={1: 1.0}))
    monkeypatch.setattr(evaluate.promotion, "decide", watch)
    with pytest.raises(SystemExit):
        decide(*paired_reports({"chat": 0.4}, 40))
    assert (seen["profile"], seen["concurrency"], seen["attempt"], seen["gate"]) == (profile, {1: 1.0}, 1, GATE)
