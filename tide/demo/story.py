"""The story `tide demo` tells: a service without a draft gets one, its traffic shifts, it adapts, and is measured.

Owns the order of the phases. Each phase is real: requests go to SGLang, cycles are runs of the Prefect deployments,
what is reported is read back from lakeFS. Starts no process itself: the caller gives it the local stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tide import wiring
from tide.demo import report as reports
from tide.demo import statics
from tide.demo.measure import Arm, ArmResult, compare
from tide.demo.phases import first_cycle, second_cycle, serve_adapted, serve_baseline, serve_without_draft, shift
from tide.demo.setting import (
    Local,
    Options,
    Story,
    clear,
    open_story,
    plugin_env,
    policy_path,
    static_key,
    write_policy,
)
from tide.engine.base import Engine


def tell(options: Options, local: Local) -> None:
    """Run the whole demo and write ``report.json`` and ``acceptance.png`` into its folder.

    Raises:
        TrafficError: a traffic file is missing, empty or malformed.
        ServiceError: a part did not start, or a cycle did not do what the story needs; says what it decided and why.
    """
    began = time.monotonic()
    story = open_story(options)
    clear(options.home)
    write_policy(story, story.plan.static_steps)
    engine = {"steps": 0, "draft_tokens": 1, "threads": 2, "plugin_env": plugin_env()}
    env = {"TIDE_POLICY_FILE": str(policy_path(story)), "TIDE_TRAIN_THREADS": "2"}
    with story.progress.step("start"), ExitStack() as parts:
        story.connect(parts.enter_context(local.running(options.home, engine, env, story.progress.say)))
        ending = parts.pop_all()
    with ending:
        cached = statics.find(options.home, static_key(story))
        serve_without_draft(story, reduced=cached is not None)
        first_cycle(story, cached)
        serve_baseline(story)
        shift(story)
        second_cycle(story)
        serve_adapted(story)
        capture = story.runner.capture_totals()
        results, speed = _measure(story, local)
    report = _report(story, began, results, speed, capture)
    path, picture = reports.write(report, options.home, story.served, story.marks)
    story.progress.say("\n" + reports.table(report) if not options.fast else "shortened: no ratios are reported")
    story.progress.say(f"report: {path}\npicture: {picture}")
    story.progress.say(f"look at the data in lakeFS: tide up --home {options.home}")


def _measure(story: Story, local: Local) -> tuple[dict[str, ArmResult], float | None]:
    """No speculation, static and adapted draft on held-out prompts of the shifted workload, interleaved.

    The engines run alone: workers and servers that poll would take turns on the same cores.
    """
    with story.progress.step("measure") as detail:
        local.end_pipeline(story.options.home, story.progress.say)
        url = local.start_plain_engine(story.options.home, story.progress.say)
        plain = wiring.engine_at(url, story.config, name="plain")
        static, adapted = (c.candidate.digest for c in story.cycles)

        def with_draft(digest: str) -> Callable[[], Engine]:
            def prepare() -> Engine:
                if story.engine.active_draft() != digest:
                    story.engine.swap_draft(digest)
                return story.engine

            return prepare

        arms = [
            Arm(name="no_speculation", prepare=lambda: plain),
            Arm(name="static", prepare=with_draft(static)),
            Arm(name="adapted", prepare=with_draft(adapted)),
        ]
        results = compare(
            arms,
            story.held_out,
            plan=story.plan.measure,
            repeats=story.plan.repeats,
            max_new_tokens=story.plan.measure_tokens,
            on_pass=detail,
        )
        with_draft(adapted)()
        speed = results["no_speculation"].output_tokens_per_s.get("1")
        return results, speed


def _report(
    story: Story, began: float, results: dict[str, ArmResult], speed: float | None, capture: dict[str, Any]
) -> reports.Report:
    swap, wall = story.cycles[-1].promotion, time.monotonic() - began
    ratio = speed / reports.REFERENCE_TOKENS_PER_S if speed else None
    return reports.Report(
        wall_s=wall,
        machine=reports.machine(),
        reference_speed_ratio=ratio,
        wall_at_reference_s=wall * ratio if ratio else None,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        steps_s=story.progress.took,
        cycles=tuple(story.cycles),
        held_out=results,
        ratios={} if story.options.fast else reports.compared(results),
        capture=capture,
        swap_s=swap.replicas[0].seconds if swap else None,
        swap_failed_requests=story.failed_during_swap,
        fast=story.options.fast,
    )
