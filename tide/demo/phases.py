"""The phases of the demo: load on the service, cycles of the pipeline, and what must have happened after each.

Each phase is real: requests go to SGLang, cycles are runs of the Prefect deployments. Knows nothing of their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tide.demo import report as reports
from tide.demo import statics
from tide.demo.load import BackgroundLoad, LoadResult, Served, serve
from tide.demo.setting import Story, plugin_env, static_key, take, write_policy
from tide.demo.traffic import Prompt
from tide.errors import ServiceError
from tide.models import candidates
from tide.repositories import CANDIDATE


def serve_without_draft(story: Story, *, reduced: bool) -> None:
    """Serve before any draft exists; fewer requests when the static draft is kept from an earlier telling."""
    with story.progress.step("serve without a draft") as detail:
        count = max(story.plan.first_requests // 3, 24) if reduced else story.plan.first_requests
        _load(story, take(story.before, 0, count), "before", detail)
        _settle(story)


def first_cycle(story: Story, cached: Path | None) -> None:
    """The published system's own case: no draft, enough traffic. The first promotion restarts the server."""
    with story.progress.step("first cycle") as detail:
        began = time.monotonic()
        branch = _promote_cached(story, cached, detail) if cached else _adapt(story, detail)
        cycle = story.runner.read(branch, time.monotonic() - began, reused=cached is not None)
        _require_promotion(story, cycle, "static draft")
        if cached is None:
            statics.keep(story.options.home, static_key(story), story.config.home / "drafts" / cycle.candidate.digest)


def serve_baseline(story: Story) -> None:
    """Serve with the static draft on its own traffic: what drift is measured against."""
    with story.progress.step("serve with the static draft") as detail:
        start = story.plan.first_requests
        _load(story, take(story.before, start, story.plan.baseline_requests), "before", detail)


def shift(story: Story) -> None:
    """Serve the other workload."""
    with story.progress.step("shift the traffic") as detail:
        story.marks.append(reports.Mark(at=time.time(), label="traffic shifts"))
        _load(story, take(story.after, 0, story.plan.shifted_requests), "after", detail)
        _settle(story)


def serve_adapted(story: Story) -> None:
    """Serve the shifted workload with the draft made for it."""
    with story.progress.step("serve with the adapted draft") as detail:
        start = story.plan.shifted_requests + story.plan.second_look_requests
        _load(story, take(story.after, start, story.plan.adapted_requests), "after", detail)


def second_cycle(story: Story) -> None:
    """The drift gate looks once, more traffic comes, it looks again and fires; the draft is swapped in under load."""
    with story.progress.step("second cycle") as detail:
        write_policy(story, story.plan.adapted_steps)
        began = time.monotonic()
        rest = take(story.after, story.plan.shifted_requests, story.plan.second_look_requests)
        branch = _adapt_under_load(story, detail)
        if not branch:
            _load(story, rest, "after", detail)
            _settle(story)
            branch = _adapt_under_load(story, detail)
        if not branch:
            story.progress.say("   the drift gate did not ask for a draft in two looks; training one all the same")
            branch = _adapt_under_load(story, detail, force="true")
        _require_promotion(story, story.runner.read(branch, time.monotonic() - began), "adapted draft")


def _load(story: Story, prompts: Sequence[Prompt], workload: str, detail: Callable[[str], None]) -> LoadResult:
    """Serve prompts and say how it went; what was served is kept for the picture."""
    tokens = story.plan.first_tokens if workload == "before" else story.plan.shifted_tokens
    count = 0

    def done(_: Served) -> None:
        nonlocal count
        count += 1
        detail(f"{count}/{len(prompts)} requests")

    result = serve(
        story.engine,
        prompts,
        workload=workload,
        concurrency=story.plan.harvest_concurrency,
        max_new_tokens=tokens,
        on_done=done,
    )
    story.served += result.served
    length = result.acceptance_length
    accepted = "no drafting" if length is None else f"acceptance length {length:.3f}"
    story.progress.say(
        f"   {len(result.served)} requests, {result.output_tokens_per_s:.0f} output tok/s, {accepted}, "
        f"{result.failed} failed"
    )
    return result


def _settle(story: Story) -> None:
    """Wait until what was served is in closed shards of a closed window."""
    time.sleep(float(plugin_env()["TIDE_SHARD_AGE_S"]) + story.config.policy().capture.window_s + 2.0)


def _promote_cached(story: Story, cached: Path, detail: Callable[[str], None]) -> str:
    draft = statics.record(cached)
    branch = f"{CANDIDATE}cached-{draft.digest[:12]}"
    story.progress.say(f"   static draft {draft.digest[:12]} of an earlier run is judged again, not trained again")
    story.runner.run("harvest", detail)
    candidates.publish(story.store, story.config.drafts_repository, branch, cached, draft, None)
    story.runner.run("promote", detail, branch=branch)
    return branch


def _adapt(story: Story, detail: Callable[[str], None], background: BackgroundLoad | None = None, **params: str) -> str:
    """Run `adapt/adapt` and the promotion it starts; the branch of its candidate, '' when no draft was asked for."""
    known, fresh = story.runner.candidate_branches(), [""]

    def poll() -> None:
        if not fresh[0] and (new := story.runner.candidate_branches() - known):
            fresh[0] = new.pop()
            if background:
                background.press()

    story.runner.run("adapt", detail, poll, **params)
    poll()
    story.runner.follow("promote", detail)
    drift = story.runner.newest_drift()
    if drift:
        story.progress.say(f"   drift gate: {drift.decision} ({drift.cause or '-'}): {'; '.join(drift.reasons)}")
    return fresh[0]


def _adapt_under_load(story: Story, detail: Callable[[str], None], **params: str) -> str:
    with BackgroundLoad(
        story.engine, story.after, workload="after", max_new_tokens=story.plan.shifted_tokens, pause_s=60.0
    ) as background:
        branch = _adapt(story, detail, background, **params)
        time.sleep(5.0)  # a few answers after the swap belong on the picture
    story.served += background.served
    story.failed_during_swap += background.failed
    return branch


def _require_promotion(story: Story, cycle: reports.Cycle, what: str) -> None:
    verdict = cycle.verdict
    story.progress.say(
        f"   verdict: {verdict.outcome}, acceptance length {verdict.overall.incumbent:.3f} -> "
        f"{verdict.overall.candidate:.3f}: {'; '.join(verdict.reasons)}"
    )
    story.cycles.append(cycle)
    if cycle.promotion is None:
        raise ServiceError(f"the {what} was not promoted: {verdict.outcome}: {'; '.join(verdict.reasons)}")
    swap = cycle.promotion.replicas[0]
    how = "restarted" if swap.restarted else "swapped"
    story.progress.say(f"   {what} {cycle.candidate.digest[:12]} {how} in {swap.seconds:.3f} s")
    story.marks.append(reports.Mark(at=cycle.promotion.at, label=what))
