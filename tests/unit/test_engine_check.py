"""Who lost the acceptance (drill D4): a loss that the walk has too is the traffic's, one only serving has is not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.traffic_stats import DRAFT, join, make_stats
from tide.config import DriftPolicy
from tide.domain import DriftReport, RequestScore
from tide.drift.baseline import Baseline
from tide.drift.engine_check import check_engine, evidence
from tide.drift.rule import freeze_baseline
from tide.states.request_stats import RequestStats

POLICY = DriftPolicy(baseline_requests=200, min_requests=50, engine_requests=20)
AFTER, TOLERANCE = 1_000.0, 0.02
RETRAIN = DriftReport(
    decision="retrain",
    cause="drift",
    reasons=("cusum: it fell",),
    figures={"window_from": AFTER + 1, "loss_since": AFTER + 1, "cusum": 40.0},
    incumbent=DRAFT,
    states_commit="s1",
)


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    """Every second request finds its prompt in the cache, as the later turns of conversations do."""
    found = freeze_baseline(alternating(200, seed=1), POLICY, draft=DRAFT)
    assert found is not None
    return found


def alternating(count: int, *, seed: int, start: float = 0.0, rate: float = 0.4, cached: float = 0.4) -> RequestStats:
    stats = make_stats(count, seed=seed, start=start, rate=rate)
    odd = np.arange(count) % 2 == 1
    stats.accepted[odd] = np.round(stats.accepted[odd] * cached / rate)
    stats.cached_tokens[odd] = stats.prompt_tokens[odd] - 1
    return stats


def walked(stats: RequestStats, rate: float | None = None, *, count: int = 200, seed: int = 3) -> list[RequestScore]:
    """Scores of some of the requests: as they were served, or as a draft with this rate would have done."""
    rng = np.random.default_rng(seed)
    accepted = stats.accepted if rate is None else rng.binomial(stats.proposed.astype(int), rate)
    return [
        RequestScore(
            request=str(stats.request[i]),
            conversation=str(stats.conversation[i]),
            slice="chat",
            tokens=int(stats.verify_steps[i] + accepted[i]),
            verify_steps=int(stats.verify_steps[i]),
            proposed=int(stats.proposed[i]),
            accepted=int(accepted[i]),
        )
        for i in range(min(count, len(stats)))
    ]


def judge(
    baseline: Baseline, window: RequestStats, scores: list[RequestScore], tolerance: float = TOLERANCE
) -> DriftReport:
    return check_engine(RETRAIN, baseline, window, scores, POLICY, tolerance=tolerance)


def test_a_loss_that_the_walk_has_too_is_the_traffics(baseline: Baseline) -> None:
    window = make_stats(100, seed=5, start=AFTER, rate=0.2)
    report = judge(baseline, window, walked(window))
    assert (report.decision, report.cause) == ("retrain", "drift")
    assert report.reasons[-1].startswith("traffic: walk and serving agree, live 0.2")


def test_a_walk_at_the_baseline_with_serving_below_it_is_the_engines(baseline: Baseline) -> None:
    window = make_stats(100, seed=5, start=AFTER, rate=0.2)
    report = judge(baseline, window, walked(window, 0.4))
    assert (report.decision, report.cause) == ("watch", "engine")
    assert report.reasons[0].startswith("engine: the draft accepts offline what it does not in serving")
    assert report.figures["engine_walked_rate"] == pytest.approx(0.4, abs=0.02)
    assert report.figures["engine_live_rate"] == pytest.approx(0.2, abs=0.02)
    assert report.figures["cusum"] == 40.0


@pytest.mark.parametrize(("rate", "decision"), [(0.25, "retrain"), (0.35, "watch")])
def test_where_both_lost_the_greater_part_decides(baseline: Baseline, rate: float, decision: str) -> None:
    window = make_stats(200, seed=5, start=AFTER, rate=0.2)
    assert judge(baseline, window, walked(window, rate)).decision == decision


@pytest.mark.parametrize(("factor", "decision"), [(1.01, "retrain"), (0.99, "watch")])
def test_the_tolerance_of_the_walk_decides(baseline: Baseline, factor: float, decision: str) -> None:
    window = make_stats(100, seed=5, start=AFTER, rate=0.2)
    scores = walked(window, 0.4)
    live = 1 + window.accepted.sum() / window.verify_steps.sum()
    apart = 1 - live / (1 + sum(s.accepted for s in scores) / sum(s.verify_steps for s in scores))
    assert judge(baseline, window, scores, float(apart * factor)).decision == decision


@pytest.mark.parametrize(("count", "decision"), [(19, "retrain"), (20, "watch")])
def test_too_few_requests_in_common_say_nothing(baseline: Baseline, count: int, decision: str) -> None:
    window = make_stats(100, seed=5, start=AFTER, rate=0.1)
    report = judge(baseline, window, walked(window, 0.4, count=count))
    assert report.decision == decision
    if decision == "retrain":
        assert "engine unchecked: 19 requests were both served and walked, 20 are needed" in report.reasons


def test_without_any_walk_the_retrain_stands_and_says_so(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(100, seed=5, start=AFTER, rate=0.2), [])
    assert report.decision == "retrain"
    assert report.reasons[-1].startswith("engine unchecked: 0 requests")


def test_walks_of_other_requests_are_not_compared(baseline: Baseline) -> None:
    window, other = make_stats(100, seed=5, start=AFTER, rate=0.2), make_stats(100, seed=6, start=AFTER)
    assert judge(baseline, window, walked(other, 0.4)).figures["engine_requests"] == 0


def test_a_walk_better_than_chance_allows_is_needed(baseline: Baseline) -> None:
    """Twenty requests that differ wildly in both directions say nothing, whatever their sum."""
    window = make_stats(20, seed=5, start=AFTER, rate=0.3)
    scores = walked(window, 0.3)
    wild = [s.model_copy(update={"accepted": s.proposed if i == 0 else 0}) for i, s in enumerate(scores[:2])]
    report = judge(baseline, window, [*wild, *(s for s in walked(window)[2:])])
    assert report.decision == "retrain"
    assert "undecided" in report.reasons[-1] or "traffic" in report.reasons[-1]


def test_a_window_in_which_only_cached_prompts_lose_is_the_engine(baseline: Baseline) -> None:
    window = alternating(120, seed=7, start=AFTER, cached=0.15)
    report = judge(baseline, window, [])
    assert (report.decision, report.cause) == ("watch", "engine")
    assert report.reasons[0].startswith("engine: only requests with a cached prompt lose")


def test_a_window_in_which_both_lose_is_not(baseline: Baseline) -> None:
    assert judge(baseline, alternating(120, seed=7, start=AFTER, rate=0.2, cached=0.2), []).decision == "retrain"


def test_cached_prompts_without_any_at_the_baseline_say_nothing() -> None:
    plain = freeze_baseline(make_stats(200, seed=1), POLICY, draft=DRAFT)
    assert plain is not None
    assert judge(plain, alternating(120, seed=7, start=AFTER, cached=0.15), []).decision == "retrain"


def test_cached_prompts_are_not_walked_for_their_states_are_not_logged(baseline: Baseline) -> None:
    window = alternating(120, seed=7, start=AFTER, rate=0.2, cached=0.2)
    assert judge(baseline, window, walked(window)).figures["engine_requests"] == 60


@pytest.mark.parametrize("changes", [{"decision": "none", "cause": None}, {"cause": "headroom"}])
def test_other_reports_are_returned_as_they_are(baseline: Baseline, changes: dict[str, object]) -> None:
    report = RETRAIN.model_copy(update=changes)
    window = make_stats(100, start=AFTER, rate=0.2)
    assert check_engine(report, baseline, window, walked(window, 0.4), POLICY, tolerance=TOLERANCE) is report


def test_the_evidence_is_the_window_and_all_since_the_loss_began() -> None:
    stats = join(make_stats(100, start=0), make_stats(100, start=AFTER))
    since = RETRAIN.model_copy(update={"figures": {"window_from": AFTER + 51, "loss_since": 91.0}})
    assert len(evidence(since, stats)) == 110
    assert len(evidence(RETRAIN, stats)) == 100
