from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.traffic_stats import BUCKETS, DRAFT, draft_model, join, make_stats
from tide.config import DriftPolicy
from tide.domain import PROBE_SLICE, DraftModel, DriftReport
from tide.drift.input_shift import divergences
from tide.drift.rule import Baseline, decide, freeze_baseline, window_of
from tide.states.request_stats import RequestStats, stats_from_table
from tide.states.requests import REQUEST_SCHEMA, request_row

POLICY = DriftPolicy(baseline_requests=200, min_requests=50)
AFTER = 1_000.0
"""Start of windows: behind the baseline's last request."""


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    found = freeze_baseline(make_stats(200, seed=1), POLICY, draft=DRAFT)
    assert found is not None
    return found


def judge(
    baseline: Baseline | None,
    window: RequestStats,
    *,
    tokens: int = 0,
    previous: DriftReport | None = None,
    incumbent: DraftModel | None = None,
    policy: DriftPolicy = POLICY,
) -> DriftReport:
    return decide(
        baseline,
        window,
        policy,
        incumbent=incumbent or draft_model(),
        trained_tokens_available=tokens,
        previous=previous,
        states_commit="s1",
    )


def cause(report: DriftReport) -> tuple[str, str | None]:
    return report.decision, report.cause


# --- bootstrap ---


def test_an_imported_draft_under_stationary_traffic_is_retrained_as_soon_as_there_are_tokens() -> None:
    """The published system's own case: nothing drifts, and the draft is not ours."""
    imported = draft_model(states_commit=None, trained_tokens=0)
    report = judge(None, make_stats(300), tokens=POLICY.bootstrap_tokens, incumbent=imported)
    assert cause(report) == ("retrain", "bootstrap")
    assert "was not trained here" in report.reasons[0]


@pytest.mark.parametrize(("tokens", "decision"), [(19_999, "none"), (20_000, "retrain")])
def test_a_first_draft_is_trained_from_bootstrap_tokens_on(tokens: int, decision: str) -> None:
    report = decide(None, make_stats(0), POLICY, incumbent=None, trained_tokens_available=tokens)
    assert (report.decision, report.incumbent) == (decision, "none")
    assert f"{tokens}" in report.reasons[0]


# --- warming and too few requests ---


def test_while_the_baseline_is_filling_nothing_is_decided() -> None:
    report = judge(None, make_stats(150, rate=0.0), tokens=10**9)
    assert cause(report) == ("none", None)
    assert report.reasons[0].startswith("warming: 150 of 200")


def test_the_baseline_of_another_draft_is_not_used(baseline: Baseline) -> None:
    other = draft_model(digest="9" * 64)
    assert judge(baseline, make_stats(300, start=AFTER), incumbent=other).reasons[0].startswith("warming")


@pytest.mark.parametrize(("count", "frozen"), [(199, False), (200, True), (400, True)])
def test_a_baseline_is_the_first_requests_and_no_others(count: int, frozen: bool) -> None:
    found = freeze_baseline(make_stats(count), POLICY, draft=DRAFT)
    assert (found is not None) is frozen
    if found:
        assert (found.requests, found.until) == (200, 200.0)


def test_unmeasured_mixed_and_foreign_requests_are_not_part_of_a_baseline() -> None:
    stats = join(
        make_stats(50, unmeasured=50),
        make_stats(50, draft="mixed", rate=0.0, start=100),
        make_stats(50, draft="none", rate=0.0, start=200),
        make_stats(199, start=300),
    )
    assert freeze_baseline(stats, POLICY, draft=DRAFT) is None
    found = freeze_baseline(join(stats, make_stats(1, start=900)), POLICY, draft=DRAFT)
    assert found is not None
    assert found.overall.rate == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(("count", "decision"), [(49, "none"), (50, "retrain")])
def test_fewer_requests_than_min_requests_give_no_verdict(baseline: Baseline, count: int, decision: str) -> None:
    report = judge(baseline, make_stats(count, rate=0.1, start=AFTER))
    assert report.decision == decision
    assert report.figures["measured"] == count


def test_losses_seen_below_min_requests_are_not_forgotten(baseline: Baseline) -> None:
    first = judge(baseline, make_stats(49, rate=0.1, start=AFTER))
    assert (first.figures["cusum"] or 0) > 20
    second = judge(baseline, make_stats(60, start=2 * AFTER), previous=first)
    assert cause(second) == ("retrain", "drift")


def test_an_empty_window_is_no_verdict(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(0))
    assert (report.decision, report.figures["rate"]) == ("none", None)


# --- acceptance ---


def test_stationary_traffic_is_stable(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(500, seed=7, start=AFTER))
    assert cause(report) == ("none", None)
    assert report.reasons[0].startswith("stable")


def test_false_alarms_are_rare(baseline: Baseline) -> None:
    alarms = [judge(baseline, make_stats(500, seed=100 + s, start=AFTER)).decision != "none" for s in range(100)]
    assert sum(alarms) <= 2


def test_a_loss_of_a_twentieth_of_the_rate_is_found_within_a_window(baseline: Baseline) -> None:
    found = [judge(baseline, make_stats(300, seed=s, rate=0.34, start=AFTER)) for s in range(20)]
    assert all(cause(report) == ("retrain", "drift") for report in found)
    assert found[0].reasons[0].startswith("cusum: acceptance rate 0.3")


def test_the_cusum_threshold_decides(baseline: Baseline) -> None:
    window = make_stats(120, seed=3, rate=0.34, start=AFTER)
    peak = judge(baseline, window).figures["cusum_peak"]
    assert peak is not None
    above, below = (POLICY.model_copy(update={"cusum_threshold": peak * f}) for f in (1.01, 0.99))
    assert judge(baseline, window, policy=above).decision == "none"
    assert judge(baseline, window, policy=below).decision == "retrain"


def test_the_cusum_slack_is_what_a_request_may_lose_for_nothing(baseline: Baseline) -> None:
    window = make_stats(300, seed=3, rate=0.36, start=AFTER)
    assert judge(baseline, window, policy=POLICY.model_copy(update={"cusum_slack": 1.0})).decision == "none"
    assert judge(baseline, window, policy=POLICY.model_copy(update={"cusum_slack": 0.1})).decision == "retrain"


def test_requests_of_the_baseline_are_not_judged_by_it(baseline: Baseline) -> None:
    report = judge(baseline, join(make_stats(200, seed=1), make_stats(60, start=AFTER)))
    assert (report.figures["requests"], report.figures["measured"], report.figures["fresh"]) == (60, 60, 60)


def test_a_baseline_without_spread_does_not_make_every_request_an_alarm() -> None:
    even = make_stats(200)
    even.accepted[:] = even.proposed * 0.4
    baseline = freeze_baseline(even, POLICY, draft=DRAFT)
    assert baseline is not None
    assert baseline.overall.sd == pytest.approx(0.01)
    assert judge(baseline, make_stats(60, sd=0.0, start=AFTER)).decision == "none"


def test_a_gain_in_acceptance_is_no_drift(baseline: Baseline) -> None:
    assert judge(baseline, make_stats(300, rate=0.6, start=AFTER)).decision == "none"


def test_a_loss_adds_up_over_windows(baseline: Baseline) -> None:
    report, windows = None, []
    for index in range(6):
        report = judge(baseline, make_stats(60, seed=index, rate=0.35, start=AFTER * (index + 1)), previous=report)
        windows.append(report.decision)
    assert windows[0] == "none"
    assert "retrain" in windows


def test_requests_that_were_counted_are_not_counted_again(baseline: Baseline) -> None:
    window = make_stats(60, rate=0.37, start=AFTER)
    first = judge(baseline, window)
    again = judge(baseline, window, previous=first)
    assert again.figures["cusum"] == first.figures["cusum"]
    assert again.figures["fresh"] == 0


def test_the_sum_of_another_draft_is_not_carried(baseline: Baseline) -> None:
    first = judge(baseline, make_stats(60, rate=0.35, start=AFTER))
    foreign = first.model_copy(update={"incumbent": "9" * 64})
    window = make_stats(60, start=2 * AFTER)
    assert judge(baseline, window, previous=foreign).figures == judge(baseline, window).figures


def test_a_recovery_shows_in_finite_time(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(2000, rate=0.1, start=AFTER))
    assert report.figures["cusum"] == 2 * (report.figures["cusum_threshold"] or 0)
    for index in range(3):
        report = judge(baseline, make_stats(300, seed=index, start=AFTER * (index + 3)), previous=report)
    assert report.decision == "none"


def test_unmeasured_requests_are_neither_zero_nor_one(baseline: Baseline) -> None:
    window = make_stats(300, seed=5, start=AFTER)
    with_gaps = join(window, make_stats(100, seed=6, start=AFTER + 400, unmeasured=100))
    alone, mixed = judge(baseline, window), judge(baseline, with_gaps)
    assert (mixed.figures["cusum"], mixed.figures["rate"]) == (alone.figures["cusum"], alone.figures["rate"])
    assert (mixed.figures["unmeasured"], mixed.figures["measured"]) == (100, 300)


def test_a_service_that_stopped_counting_is_watched(baseline: Baseline) -> None:
    window = join(make_stats(60, start=AFTER), make_stats(80, start=AFTER + 100, unmeasured=80))
    report = judge(baseline, window)
    assert report.decision == "watch"
    assert report.reasons[0].startswith("unmeasured: 80 of 140")


def test_requests_during_a_swap_and_of_other_drafts_are_left_out(baseline: Baseline) -> None:
    window = make_stats(300, seed=5, start=AFTER)
    others = join(
        make_stats(200, draft="mixed", rate=0.0, start=AFTER + 400),
        make_stats(200, draft="9" * 64, rate=0.0, start=AFTER + 700),
    )
    report = judge(baseline, join(window, others))
    assert report.decision == "none"
    assert (report.figures["mixed"], report.figures["other_drafts"]) == (200, 200)


def test_a_change_of_mix_between_slices_is_no_loss() -> None:
    """Half of the baseline is easy, half hard; a window of hard requests alone accepts as the hard ones always did."""
    easy, hard = make_stats(100, rate=0.6, slices=["easy"]), make_stats(100, rate=0.3, slices=["hard"], start=200)
    baseline = freeze_baseline(join(easy, hard), POLICY, draft=DRAFT)
    assert baseline is not None
    window = make_stats(300, seed=4, rate=0.3, slices=["hard"], start=AFTER)
    report = judge(baseline, window)
    assert (report.figures["cusum_peak"] or 0) < POLICY.cusum_threshold
    assert report.figures["expected_rate"] == pytest.approx(0.3, abs=0.02)


def test_a_slice_that_was_not_there_is_judged_by_all(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(120, rate=0.15, slices=["new"], start=AFTER))
    assert cause(report) == ("retrain", "drift")


def test_sampled_requests_are_judged_by_their_own_baseline() -> None:
    greedy, sampled = make_stats(100, rate=0.6), make_stats(100, rate=0.3, sampling="sampled", start=200)
    baseline = freeze_baseline(join(greedy, sampled), POLICY, draft=DRAFT)
    assert baseline is not None
    assert baseline.regimes.keys() == {"chat|greedy", "chat|sampled"}
    window = make_stats(200, rate=0.3, sampling="sampled", start=AFTER)
    assert (judge(baseline, window).figures["cusum_peak"] or 0) < POLICY.cusum_threshold


def test_a_small_baseline_asks_for_a_greater_loss() -> None:
    """Fifty requests may be off by .35 standard deviations: what could be their own error is no loss."""
    slack = {}
    for count in (50, 800):
        policy = POLICY.model_copy(update={"baseline_requests": count})
        found = freeze_baseline(make_stats(count, seed=1), policy, draft=DRAFT)
        assert found is not None
        slack[count] = found.slack(make_stats(1), policy)[0]
        none = policy.model_copy(update={"baseline_errors": 0.0})
        assert found.slack(make_stats(1), none)[0] == policy.cusum_slack
    assert slack[50] == pytest.approx(POLICY.baseline_errors / np.sqrt(50), rel=0.3)
    assert slack[800] == POLICY.cusum_slack


def test_conversations_that_stand_or_fall_together_raise_the_threshold() -> None:
    alone = freeze_baseline(make_stats(200, seed=1, spread=0.1), POLICY, draft=DRAFT)
    together = freeze_baseline(make_stats(200, seed=1, spread=0.1, turns=10), POLICY, draft=DRAFT)
    assert alone is not None
    assert together is not None
    assert together.alarm > 1.5 * alone.alarm
    window = make_stats(200, seed=3, rate=0.3, start=AFTER)
    assert judge(together, window).figures["cusum_threshold"] == max(together.alarm, POLICY.cusum_threshold)


def test_the_false_alarm_rate_is_policy() -> None:
    alarms = []
    for rate in (0.2, 0.005):
        policy = POLICY.model_copy(update={"false_alarm_rate": rate})
        found = freeze_baseline(make_stats(200, seed=1), policy, draft=DRAFT)
        assert found is not None
        alarms.append(found.alarm)
    assert alarms[0] < 0.8 * alarms[1]


def test_long_requests_that_always_accepted_less_are_no_loss() -> None:
    """The pooled rate is that of long requests; the sum of losses is centred on what requests did at the baseline."""

    def stats(seed: int, start: float = 0.0) -> RequestStats:
        found = make_stats(400, seed=seed, start=start)
        found.accepted[:] = np.round(found.accepted * np.where(found.verify_steps > 40, 0.6, 1.2))
        return found

    policy = POLICY.model_copy(update={"baseline_requests": 400})
    baseline = freeze_baseline(stats(1), policy, draft=DRAFT)
    assert baseline is not None
    assert baseline.losses(stats(1)).mean() == pytest.approx(0.0, abs=1e-9)
    assert judge(baseline, stats(2, AFTER), policy=policy).decision == "none"


# --- context lengths (drill D3) and cached prompts ---


def with_long(count: int, *, lost: float = 1.0, seed: int = 1, start: float = 0.0) -> RequestStats:
    """Every third request has a prompt of 3,000 tokens and accepts ``lost`` of what it would."""
    stats = make_stats(count, seed=seed, start=start)
    third = np.arange(count) % 3 == 0
    stats.prompt_tokens[third] = 3000.0
    stats.accepted[third] = np.round(stats.accepted[third] * lost)
    return stats


def test_long_contexts_that_lose_alone_are_watched() -> None:
    baseline = freeze_baseline(with_long(200), POLICY, draft=DRAFT)
    assert baseline is not None
    window = with_long(180, lost=0.65, seed=2, start=AFTER)
    report = judge(baseline, window, policy=POLICY.model_copy(update={"cusum_threshold": 500.0}))
    assert report.decision == "watch"
    assert report.reasons[0].startswith("context_4096: the 60 requests of this length lose")
    assert (report.figures["requests_context_4096"], report.figures["requests_context_1024"]) == (60, 120)
    assert (report.figures["loss_context_4096"] or 0) > 1 > (report.figures["loss_context_1024"] or 0)


def test_long_contexts_that_were_always_worse_are_not() -> None:
    baseline = freeze_baseline(with_long(200, lost=0.6), POLICY, draft=DRAFT)
    assert baseline is not None
    report = judge(baseline, with_long(180, lost=0.6, seed=2, start=AFTER))
    assert report.decision == "none"
    assert report.figures["loss_context_4096"] == pytest.approx(0, abs=0.4)


def test_traffic_longer_than_the_draft_was_trained_on_is_counted_and_decides_nothing() -> None:
    baseline = freeze_baseline(with_long(200), POLICY, draft=DRAFT)
    assert baseline is not None
    window = with_long(180, seed=2, start=AFTER)
    report = judge(baseline, window, incumbent=draft_model(max_length=2048))
    assert (report.decision, report.figures["longer_than_trained"]) == ("none", 60)
    assert "length: 60 of 180 requests are longer than the 2048 tokens the draft was trained on" in report.reasons
    assert report.reasons[0].startswith("stable")
    assert judge(baseline, window).figures["longer_than_trained"] is None


def test_cached_prompts_have_figures_of_their_own(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(100, seed=2, start=AFTER, cached=40))
    assert (report.figures["requests_cached"], report.figures["requests_uncached"]) == (40, 60)


def test_a_request_of_many_steps_weighs_more(baseline: Baseline) -> None:
    window = make_stats(2, start=AFTER)
    window.verify_steps[:] = [10.0, 90.0]
    window.proposed[:] = [30.0, 270.0]
    window.accepted[:] = [0.0, 0.0]
    few, many = baseline.standardised(window)
    assert many / few == pytest.approx(3.0)


# --- inputs ---


@pytest.mark.parametrize(
    ("changes", "signal"),
    [
        ({"token_shift": 7}, "tokens"),
        ({"prompt_tokens": 900.0}, "prompt_length"),
        ({"script": "cyrillic"}, "script"),
        ({"state_shift": 4.0}, "pooled"),
    ],
    ids=["tokens", "lengths", "script", "pooled"],
)
def test_moved_inputs_alone_are_watched_first_and_retrained_on_when_they_stay(
    baseline: Baseline, changes: dict[str, object], signal: str
) -> None:
    first = judge(baseline, make_stats(100, seed=8, start=AFTER, **changes))  # type: ignore[arg-type]
    assert cause(first) == ("watch", None)
    assert signal in first.reasons[0]
    second = judge(baseline, make_stats(100, seed=9, start=2 * AFTER, **changes), previous=first)  # type: ignore[arg-type]
    assert cause(second) == ("retrain", "drift")
    assert second.reasons[0].startswith("inputs")


def test_the_same_window_twice_is_not_two_windows(baseline: Baseline) -> None:
    window = make_stats(100, seed=8, start=AFTER, token_shift=7)
    first = judge(baseline, window)
    assert judge(baseline, window, previous=first).decision == "watch"


def test_inputs_that_came_back_start_over(baseline: Baseline) -> None:
    moved = judge(baseline, make_stats(100, seed=8, start=AFTER, token_shift=7))
    back = judge(baseline, make_stats(100, seed=9, start=2 * AFTER), previous=moved)
    again = judge(baseline, make_stats(100, seed=10, start=3 * AFTER, token_shift=7), previous=back)
    assert (back.decision, again.decision) == ("none", "watch")


def test_a_window_with_few_requests_does_not_break_the_row(baseline: Baseline) -> None:
    moved = judge(baseline, make_stats(100, seed=8, start=AFTER, token_shift=7))
    quiet = judge(baseline, make_stats(5, start=2 * AFTER), previous=moved)
    again = judge(baseline, make_stats(100, seed=10, start=3 * AFTER, token_shift=7), previous=quiet)
    assert (quiet.decision, again.decision) == ("none", "retrain")


@pytest.mark.parametrize("windows", [1, 3])
def test_the_number_of_consecutive_windows_is_policy(baseline: Baseline, windows: int) -> None:
    policy, report, decisions = POLICY.model_copy(update={"consecutive_windows": windows}), None, []
    for index in range(3):
        window = make_stats(100, seed=index, start=AFTER * (index + 1), token_shift=7)
        report = judge(baseline, window, previous=report, policy=policy)
        decisions.append(report.decision)
    assert decisions.index("retrain") == windows - 1


INPUTS = {
    "tokens_js": "input_js_threshold",
    "prompt_length_js": "length_js_threshold",
    "response_length_js": "length_js_threshold",
    "script_js": "script_js_threshold",
    "pooled_mmd": "pooled_mmd_threshold",
}


@pytest.mark.parametrize("figure", INPUTS)
def test_each_input_threshold_decides(baseline: Baseline, figure: str) -> None:
    window = make_stats(100, seed=8, start=AFTER, token_shift=7, prompt_tokens=900.0, script="cyrillic", state_shift=4)
    window.response_tokens[:] = 900.0
    name, field, distance = figure.rpartition("_")[0], INPUTS[figure], judge(baseline, window).figures[figure]
    assert distance is not None
    for factor, flagged in ((0.99, True), (1.01, False)):
        limit = min(distance * factor, 1.0)
        report = judge(baseline, window, policy=POLICY.model_copy(update={field: limit}))
        assert (f"{name} {distance:.3f} >" in " ".join(report.reasons)) is flagged


def test_the_noise_of_small_samples_is_taken_off_the_distance(baseline: Baseline) -> None:
    """Raw, 60 requests of 90 tokens in 512 buckets are at .2 from their own distribution."""
    found = [judge(baseline, make_stats(60, seed=s, start=AFTER)).figures["tokens_js"] or 0.0 for s in range(20, 30)]
    assert max(found) < 0.08


def test_a_distance_that_sampling_could_make_is_no_shift(baseline: Baseline) -> None:
    """The same distance, where split halves of the reference themselves differ as much."""
    noisy = {name: signal.model_copy(update={"noise_sd": 10.0}) for name, signal in baseline.signals.items()}
    window = make_stats(100, seed=8, start=AFTER, token_shift=7)
    sure, unsure = judge(baseline, window), judge(baseline.model_copy(update={"signals": noisy}), window)
    assert unsure.figures["tokens_js"] == sure.figures["tokens_js"]
    assert (sure.decision, unsure.decision) == ("watch", "none")


@pytest.mark.parametrize("count", [60, 500, 5000])
def test_draws_from_one_distribution_are_not_flagged_whatever_their_size(baseline: Baseline, count: int) -> None:
    trials = 40 if count < 500 else 8
    windows = [make_stats(count, seed=200 + seed, start=AFTER) for seed in range(trials)]
    assert [judge(baseline, window).figures["input_streak"] for window in windows] == [0.0] * trials


def test_a_small_reference_does_not_flag_either() -> None:
    policy, streaks = POLICY.model_copy(update={"baseline_requests": 50}), []
    for seed in range(40):
        small = freeze_baseline(make_stats(50, seed=seed), policy, draft=DRAFT)
        streaks.append(
            judge(small, make_stats(50, seed=900 + seed, start=AFTER), policy=policy).figures["input_streak"]
        )
    assert sum(bool(streak) for streak in streaks) <= 1


def test_requests_without_a_sketch_say_nothing_of_tokens(baseline: Baseline) -> None:
    window = make_stats(100, seed=8, start=AFTER, token_shift=7)
    window.sketch[:60] = 0
    report = judge(baseline, window)
    assert "tokens_js" not in report.figures
    assert report.reasons == ("absent: 60% of requests have no sketch, 0% at the baseline",)


@pytest.mark.parametrize(("gaps", "decision"), [(11, "none"), (30, "watch")])
@pytest.mark.parametrize("signal", ["sketch", "pooled"])
def test_a_signal_that_is_missing_more_often_is_watched(
    baseline: Baseline, signal: str, gaps: int, decision: str
) -> None:
    window = make_stats(200, seed=8, start=AFTER)
    if signal == "sketch":
        window.sketch[:gaps] = 0
    else:
        window.pooled[:gaps] = np.nan
    report = judge(baseline, window)
    assert report.decision == decision
    assert report.figures[f"{signal}_absent"] == pytest.approx(gaps / 200)


def test_how_much_may_be_missing_is_policy(baseline: Baseline) -> None:
    window = make_stats(200, seed=8, start=AFTER)
    window.sketch[:30] = 0
    assert judge(baseline, window, policy=POLICY.model_copy(update={"absent_threshold": 0.16})).decision == "none"


def test_a_signal_that_was_always_missing_is_nothing_new() -> None:
    first, window = make_stats(200, seed=1), make_stats(200, seed=2, start=AFTER)
    first.pooled[:], window.pooled[:] = np.nan, np.nan
    without = freeze_baseline(first, POLICY, draft=DRAFT)
    assert without is not None
    assert without.states is None
    assert judge(without, window).decision == "none"


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.lists(st.integers(0, 50), min_size=4, max_size=4))
@settings(deadline=None)
def test_a_divergence_is_symmetric_and_between_zero_and_one(left: list[int], right: list[int]) -> None:
    a, b = np.array([left], dtype=float) + 0.001, np.array([right], dtype=float) + 0.001
    found = divergences(a, b)[0]
    assert 0 <= found <= 1
    assert found == pytest.approx(divergences(b, a)[0])
    assert divergences(a, 3 * a)[0] == pytest.approx(0.0, abs=1e-12)


def test_disjoint_histograms_are_one_bit_apart() -> None:
    assert divergences(np.array([[1.0, 0.0]]), np.array([[0.0, 5.0]]))[0] == pytest.approx(1.0)


def test_a_change_of_the_mix_between_known_slices_moves_no_input() -> None:
    """The day has more of one slice, the night more of another: neither was new."""

    def mixed(day: int, night: int, seed: int, start: float = 0.0) -> RequestStats:
        first = make_stats(day, seed=seed, start=start, slices=["day"])
        changes: dict[str, Any] = {"token_shift": 7, "prompt_tokens": 900.0, "script": "cyrillic", "state_shift": 4}
        return join(first, make_stats(night, seed=seed, start=start + day, slices=["night"], **changes))

    baseline = freeze_baseline(mixed(140, 60, 1), POLICY, draft=DRAFT)
    assert baseline is not None
    quiet, moved = judge(baseline, mixed(10, 140, 2, AFTER)), judge(baseline, mixed(150, 0, 2, AFTER))
    assert (quiet.decision, moved.decision) == ("none", "none")
    swapped = make_stats(150, seed=3, start=AFTER, slices=["day"], token_shift=7, script="cyrillic", state_shift=4)
    assert judge(baseline, swapped).decision == "watch"


# --- windows ---


def test_a_window_is_what_finished_since_the_look_before(baseline: Baseline) -> None:
    stats, incumbent = make_stats(200, start=AFTER), draft_model()
    assert len(window_of(stats, POLICY, incumbent=incumbent, previous=None)) == 200
    first = judge(baseline, stats.take(stats.finished_at <= AFTER + 80))
    assert len(window_of(stats, POLICY, incumbent=incumbent, previous=first)) == 120


def test_a_window_is_filled_up_with_measured_requests_until_it_can_be_judged(baseline: Baseline) -> None:
    stats, incumbent = make_stats(100, start=AFTER), draft_model()
    first = judge(baseline, stats.take(stats.finished_at <= AFTER + 90))
    window = window_of(stats, POLICY, incumbent=incumbent, previous=first)
    report = judge(baseline, window, previous=first)
    assert len(window) == POLICY.min_requests
    assert (report.figures["measured"], report.figures["fresh"]) == (50, 10)
    assert report.figures["cusum"] == pytest.approx(judge(baseline, stats).figures["cusum"])


def test_a_window_filled_up_with_old_requests_is_not_one_more_in_a_row(baseline: Baseline) -> None:
    stats = make_stats(149, seed=8, start=AFTER, token_shift=7)
    first = judge(baseline, stats.take(stats.finished_at <= AFTER + 60))
    second = judge(baseline, stats.take(stats.finished_at <= AFTER + 109), previous=first)
    third = judge(baseline, stats.take(stats.finished_at <= AFTER + 110), previous=second)
    assert [r.decision for r in (first, second, third)] == ["watch", "watch", "retrain"]


def test_a_verdict_on_another_draft_does_not_shorten_the_window(baseline: Baseline) -> None:
    stats = make_stats(100, start=AFTER)
    report = judge(baseline, stats)
    assert len(window_of(stats, POLICY, incumbent=draft_model(digest="9" * 64), previous=report)) == 100
    assert len(window_of(stats, POLICY, incumbent=None, previous=report)) == 100


# --- headroom ---


@pytest.mark.parametrize(("tokens", "expected"), [(199_999, ("none", None)), (200_000, ("retrain", "headroom"))])
def test_twice_the_tokens_promise_headroom(baseline: Baseline, tokens: int, expected: tuple[str, str | None]) -> None:
    assert cause(judge(baseline, make_stats(200, seed=7, start=AFTER), tokens=tokens)) == expected


def test_the_growth_factor_is_policy(baseline: Baseline) -> None:
    policy = POLICY.model_copy(update={"growth_factor": 3.0})
    assert judge(baseline, make_stats(200, seed=7, start=AFTER), tokens=200_000, policy=policy).decision == "none"


def test_drift_is_named_before_headroom(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(200, rate=0.1, start=AFTER), tokens=10**6)
    assert cause(report) == ("retrain", "drift")
    assert [reason.partition(":")[0] for reason in report.reasons] == ["cusum", "headroom"]


# --- records and tables ---


def test_reports_and_baselines_can_be_stored(baseline: Baseline) -> None:
    report = judge(baseline, make_stats(200, rate=0.1, start=AFTER, token_shift=7))
    assert DriftReport.model_validate_json(report.to_json()) == report
    assert Baseline.model_validate_json(baseline.to_json()) == baseline
    assert (report.incumbent, report.states_commit) == (DRAFT, "s1")


def table(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=REQUEST_SCHEMA)


def test_a_request_table_becomes_arrays_in_the_order_of_finish() -> None:
    sketch = [0] * BUCKETS
    sketch[3] = 9
    late = request_row(
        "late", 1.0, 9.0, slice="code", sampling="greedy", draft=DRAFT, verify_steps=10, proposed=30, accepted=12,
        token_sketch=sketch, script="latin", prompt_tokens=40, response_tokens=23, cached_tokens=21,
        conversation="talk", pooled=[0.5] * 64,
    )  # fmt: skip
    early = request_row("early", 2.0, 5.0, draft="mixed")
    stats = stats_from_table(table(late, early))
    assert stats.finished_at.tolist() == [5.0, 9.0]
    assert stats.regime.tolist() == ["unknown|unknown", "code|greedy"]
    assert stats.script.tolist() == ["unknown", "latin"]
    assert stats.measured.tolist() == [False, True]
    assert np.isnan(stats.rate[0])
    assert stats.rate[1] == pytest.approx(0.4)
    assert stats.sketch.sum(axis=1).tolist() == [0, 9]
    assert stats.sketch[1, 3] == 9
    assert (stats.request.tolist(), stats.conversation.tolist()) == (["early", "late"], ["early", "talk"])
    assert (stats.cached.tolist(), stats.context.tolist()) == ([False, True], [0, 63])
    assert (stats.has_pooled.tolist(), stats.has_sketch.tolist()) == ([False, True], [False, True])
    assert stats.slice.tolist() == ["unknown", "code"]


def test_requests_that_tide_sent_itself_are_no_traffic() -> None:
    probe = request_row("probe", 1.0, 2.0, slice=PROBE_SLICE, verify_steps=10, proposed=30, accepted=0)
    stats = stats_from_table(table(probe, request_row("user", 1.0, 2.0, slice="chat"), request_row("silent", 1.0, 3.0)))
    assert stats.request.tolist() == ["user", "silent"]


def test_an_empty_table_becomes_empty_arrays() -> None:
    stats = stats_from_table(REQUEST_SCHEMA.empty_table())
    assert (len(stats), stats.sketch.shape) == (0, (0, BUCKETS))


@pytest.mark.parametrize(
    "counters",
    [{"proposed": None}, {"accepted": None}, {"verify_steps": None}, {"proposed": 0}, {"verify_steps": 0}],
    ids=lambda counters: "-".join(f"{k}={v}" for k, v in counters.items()),
)
def test_a_request_without_a_counter_is_unmeasured(counters: dict[str, object]) -> None:
    full: dict[str, object] = {"proposed": 30, "accepted": 12, "verify_steps": 10}
    stats = stats_from_table(table(request_row("r", 1.0, 2.0, **(full | counters))))
    assert not stats.measured.any()
    assert np.isnan(stats.rate).all()
