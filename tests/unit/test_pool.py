"""The draft pool: which draft that served before is proposed again, and that its gate is that of any candidate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import pool as task
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.drafts import draft_config, draft_tensors
from tests.support.reports import TARGET, report, score
from tests.support.signed import AUTHORITY, judge_and_promote, put_verdict, verdict_on
from tide import repositories, wiring
from tide.domain import DraftModel, DriftReport, EvalReport, PoolChoice, Promotion, Snapshot
from tide.errors import ContractMismatch, EvaluationError, SignatureRefused
from tide.lineage import history, ledger
from tide.models import candidates, pool
from tide.models.draft_files import read_contract
from tide.serving import rollout, serving_file
from tide.serving.rollout import Site, draft_prefix, read_serving

REPOSITORY = "smollm2-drafts"
A, B, C, D = "a" * 64, "b" * 64, "c" * 64, "d" * 64
COMMIT = "5" * 64
CONTRACT = read_contract(draft_config(), draft_tensors(draft_config())["d2t"])
SNAPSHOT = Snapshot(
    repository="smollm2-states", commit=COMMIT, target=TARGET, windows=(), shards=1, requests=1, rows=1, drafts=()
)
DRIFT = DriftReport(
    decision="retrain", cause="drift", reasons=("cusum",), figures={}, incumbent=B, states_commit=COMMIT
)


def model(digest: str, **changes: object) -> DraftModel:
    return DraftModel.model_validate({"digest": digest, "contract": CONTRACT, "target": TARGET} | changes)


def changes(*drafts: str) -> list[Promotion]:
    """One change of what serves after another."""
    return [
        Promotion(kind="promotion", generation=n, draft=draft, previous=None, verdict=None, replicas=(), at=float(n))
        for n, draft in enumerate(drafts, start=1)
    ]


def walked(draft: str, length: float) -> EvalReport:
    """100 verify steps."""
    scores = [score(f"r{n}", 100, round(100 / length * 100) // 100) for n in range(20)]
    return report(draft, scores, states_commit=COMMIT)


def choose(incumbent: EvalReport, *others: EvalReport, min_gain: float = 0.02) -> PoolChoice:
    return pool.choose(incumbent, others, min_gain)


# --- the rule ---


def test_the_pool_is_what_served_before_the_last_first_and_never_the_incumbent() -> None:
    assert pool.members(changes(A, B, C, A, D), D, 9) == [A, C, B]
    assert pool.members(changes(A, B, C, A, D), D, 2) == [A, C]
    assert pool.members(changes(A, B, C)[::-1], B, 9) == [C, A], "by generation, not by the order of a listing"
    assert pool.members(changes(A), A, 4) == []
    assert pool.members(changes(A, B), B, 0) == []


@pytest.mark.parametrize(
    ("decision", "cause", "asked"),
    [
        ("retrain", "drift", True),
        ("retrain", "headroom", False),
        ("retrain", "bootstrap", False),
        ("watch", None, False),
        ("none", None, False),
    ],
)
def test_only_drift_asks_the_pool(decision: str, cause: str | None, asked: bool) -> None:
    assert pool.wanted(DRIFT.model_copy(update={"decision": decision, "cause": cause})) is asked


def test_a_draft_of_another_target_or_shape_is_left_out_with_the_part_that_differs() -> None:
    assert pool.unfit(model(A), model(B), TARGET) is None
    other = model(A, target=TARGET.model_copy(update={"dtype": "float16"}))
    assert "dtype" in (pool.unfit(other, model(B), TARGET) or "")
    wider = model(A, contract=CONTRACT.model_copy(update={"intermediate_size": 7}))
    assert "intermediate_size" in (pool.unfit(wider, model(B), TARGET) or "")
    remapped = model(A, contract=CONTRACT.model_copy(update={"vocab_map": "0" * 64}))
    assert pool.unfit(remapped, model(B), TARGET) is None, "a running engine may exchange the map"


def test_the_best_of_the_pool_is_proposed() -> None:
    choice = choose(walked(B, 2.0), walked(A, 2.5), walked(C, 4.0))
    assert choice.chosen == C
    assert choice.lengths == {A: 2.5, C: 4.0}
    assert (choice.incumbent, choice.incumbent_length, choice.requests) == (B, 2.0, 20)
    assert choice.reason.startswith("draft cccccccccccc, the best of 2 that served before, has 4.000")
    assert choice.states_commit == COMMIT


@pytest.mark.parametrize(("min_gain", "chosen"), [(0.49, A), (0.5, None), (0.51, None)])
def test_a_gain_must_be_above_the_least_one(min_gain: float, chosen: str | None) -> None:
    choice = choose(walked(B, 2.0), walked(A, 2.5), min_gain=min_gain)
    assert choice.chosen == chosen
    assert choice.lengths == {A: 2.5}
    assert ("not above" in choice.reason) is (chosen is None)


def test_of_equal_drafts_the_one_that_served_later_is_proposed() -> None:
    assert choose(walked(B, 2.0), walked(C, 2.5), walked(A, 2.5)).chosen == C


def test_an_empty_pool_proposes_nothing() -> None:
    assert choose(walked(B, 2.0)).chosen is None


def test_reports_on_other_requests_states_or_targets_are_refused() -> None:
    ours = walked(B, 2.0)
    with pytest.raises(EvaluationError, match="other requests"):
        choose(ours, report(A, [score("elsewhere", 100, 50)], states_commit=COMMIT))
    with pytest.raises(EvaluationError, match="states_commit"):
        choose(ours, walked(A, 2.5).model_copy(update={"states_commit": "6" * 64}))
    with pytest.raises(ContractMismatch, match="dtype"):
        choose(ours, walked(A, 2.5).model_copy(update={"target": TARGET.model_copy(update={"dtype": "float16"})}))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(25, 100), min_size=1, max_size=4, unique=True), st.randoms())
def test_the_order_of_the_pool_does_not_matter(steps: list[int], random: object) -> None:
    reports = [report(f"{n:064x}", [score("r", 100, s)], states_commit=COMMIT) for n, s in enumerate(steps)]
    shuffled = reports[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    incumbent = report(B, [score("r", 100, 60)], states_commit=COMMIT)
    assert choose(incumbent, *shuffled).chosen == choose(incumbent, *reports).chosen


# --- proposing again ---


def store_with(*digests: str) -> MemoryStore:
    store = MemoryStore()
    repositories.ensure_drafts(store, REPOSITORY)
    for digest in digests:
        branch = f"candidate-{digest[:6]}"
        store.create_branch(REPOSITORY, branch, "main")
        for name in ("config.json", "model.safetensors"):
            store.put(REPOSITORY, branch, draft_prefix(digest) + name, f"{name} of {digest[:3]}".encode())
        store.put(REPOSITORY, branch, f"{draft_prefix(digest)}draft.json", model(digest).to_json().encode())
        store.commit(REPOSITORY, branch, "candidate", {})
    return store


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryStore, Site]:
    """A served, then C, now B serves."""
    store = store_with(A, C, B)
    site = Site(store, REPOSITORY, [FakeEngine()], tmp_path / "drafts")
    for digest in (A, C, B):
        judge_and_promote(store, REPOSITORY, site, f"candidate-{digest[:6]}", digest)
    monkeypatch.setattr(wiring, "store", lambda _config: store)
    monkeypatch.setattr(wiring, "settings", lambda: settings_in(tmp_path))
    return store, site


def settings_in(home: Path) -> wiring.Settings:
    return wiring.Settings(home=home, _env_file=None)  # type: ignore[call-arg]


def look(monkeypatch: pytest.MonkeyPatch, lengths: Mapping[str, float], drift: DriftReport = DRIFT) -> str | None:
    """The task with walks of these lengths; none at all when there are none."""

    def walk(folder: Path, snapshot: Snapshot) -> EvalReport | None:
        return walked(folder.name, lengths[folder.name]) if lengths else None

    monkeypatch.setattr(task, "walk_selection", walk)
    monkeypatch.setattr(task, "get_run_logger", Silent)
    return task.look_in_pool.fn(SNAPSHOT, drift)


class Silent:
    def info(self, *_: object) -> None:
        """Takes what a flow's logger takes."""


def test_the_best_draft_stands_on_a_branch_of_its_own_without_the_verdict_of_then(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, site = served
    branch = look(monkeypatch, {B: 2.0, C: 2.1, A: 2.5})
    assert branch is not None
    assert branch.startswith(repositories.CANDIDATE)
    assert serving_file.candidate_on(store, REPOSITORY, branch) == A
    written = PoolChoice.model_validate_json(store.read(REPOSITORY, branch, draft_prefix(A) + candidates.POOL_FILE))
    assert (written.chosen, written.lengths) == (A, {C: pytest.approx(2.1, abs=0.05), A: 2.5})
    with pytest.raises(SignatureRefused, match="no signed verdict"):
        rollout.resume(site, AUTHORITY, branch)
    assert ledger.newest(store, REPOSITORY, "pool", PoolChoice) == written


def test_with_a_new_verdict_it_is_promoted_like_any_candidate(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, site = served
    branch = look(monkeypatch, {B: 2.0, C: 2.1, A: 2.5})
    assert branch is not None
    promotion = judge_and_promote(store, REPOSITORY, site, branch, A)
    serving = read_serving(store, REPOSITORY)
    assert (promotion.kind, promotion.generation, serving.stable and serving.stable.digest) == ("promotion", 4, A)
    assert store.head(REPOSITORY, "main").metadata["tide.kind"] == "promotion"
    assert rollout.reconcile(site, AUTHORITY.trusted) == []
    assert [name[:10] for name, _ in store.tags(REPOSITORY)] == [f"gen-00000{n}" for n in range(1, 5)]


def test_a_verdict_that_is_no_promote_keeps_it_out(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, site = served
    branch = look(monkeypatch, {B: 2.0, C: 2.1, A: 2.5})
    assert branch is not None
    put_verdict(store, REPOSITORY, branch, verdict_on(A, incumbent=B, outcome="inconclusive"))
    with pytest.raises(SignatureRefused, match="inconclusive"):
        rollout.resume(site, AUTHORITY, branch)
    assert read_serving(store, REPOSITORY).generation == 3


def test_it_is_no_second_candidate_in_the_lineage(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = served
    branch = look(monkeypatch, {B: 2.0, C: 2.1, A: 2.5})
    assert branch is not None
    found = {e.record.kind: e.record for e in history.events(store.log(REPOSITORY, branch))}
    assert found["pooled"].subject == A
    assert found["pooled"].facts["acceptance_length"] == "2.5000"
    assert "candidate" not in found, "these drafts were made without a record; the proposal adds none"


def test_when_none_is_better_the_ledger_says_so_and_no_branch_is_made(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = served
    before = list(store.branches(REPOSITORY))
    assert look(monkeypatch, {B: 2.0, C: 2.0, A: 1.9}) is None
    assert set(store.branches(REPOSITORY)) - set(before) == {ledger.BRANCH}
    found = ledger.newest(store, REPOSITORY, "pool", PoolChoice)
    assert found is not None
    assert "not above" in found.reason


def test_without_selection_requests_none_is_proposed(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = served
    assert look(monkeypatch, {}) is None
    found = ledger.newest(store, REPOSITORY, "pool", PoolChoice)
    assert found is not None
    assert "no selection requests" in found.reason


def test_headroom_is_not_for_the_pool(served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = served
    assert look(monkeypatch, {}, DRIFT.model_copy(update={"cause": "headroom"})) is None
    assert ledger.newest(store, REPOSITORY, "pool", PoolChoice) is None


def test_a_draft_of_another_shape_is_named_in_the_ledger_and_not_walked(
    served: tuple[MemoryStore, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = served
    monkeypatch.setattr(pool, "unfit", lambda draft, *_: "head_dim: 8 != 16" if draft.digest == A else None)
    assert look(monkeypatch, {B: 2.0, C: 2.0}) is None
    found = ledger.newest(store, REPOSITORY, "pool", PoolChoice)
    assert found is not None
    assert found.left_out == {A: "head_dim: 8 != 16"}
    assert list(found.lengths) == [C]
