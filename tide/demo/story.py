"""The story `tide demo` tells: a service without a draft gets one, its traffic shifts, it adapts, and is measured.

Owns the order of the phases. Each phase is real: requests go to SGLang, cycles are runs of the Prefect deployments,
what is reported is read back from lakeFS. Starts no process itself: the caller gives it the local stack.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tide import candidates, wiring
from tide.config import Settings
from tide.demo import plan as plans
from tide.demo import report as reports
from tide.demo import statics
from tide.demo.cycles import Cycles
from tide.demo.load import BackgroundLoad, LoadResult, Served, serve
from tide.demo.measure import Arm, ArmResult, compare
from tide.demo.progress import Progress
from tide.demo.traffic import Prompt, load_workload, read_traffic_file, split_for_measuring, with_gate_share
from tide.domain import Split, split_of
from tide.engine.base import Engine
from tide.engine.sglang import SglangEngine
from tide.errors import ServiceError
from tide.sglang_plugin.admission import conversation_hash

MEASURED_PROMPTS = 70
HASH_KEY = "the demo's prompts are public, and its splits should be the same each time"
KEPT = ("models", "bundle", "static")
"""What a second telling reuses; everything else of the demo's folder is made anew."""


@dataclass(frozen=True)
class Local:
    """What the story needs of the local stack, given by the command."""

    running: Callable[..., AbstractContextManager[Any]]
    """``(home, engine, env, report)``: a stack for as long as the block lasts; it has ``env``."""
    start_plain_engine: Callable[[Path, Callable[[str], None]], str]
    """Starts a second engine of the same target without speculation and tap; returns its address."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    home: Path
    fast: bool = False
    before: Path | None = None
    after: Path | None = None


@dataclass
class Story:
    """One telling: its settings, its parts, and what was seen so far."""

    options: Options
    plan: plans.Plan
    progress: Progress
    before: list[Prompt]
    after: list[Prompt]
    held_out: list[Prompt]
    served: list[Served] = field(default_factory=list)
    marks: list[reports.Mark] = field(default_factory=list)
    cycles: list[reports.Cycle] = field(default_factory=list)
    failed_during_swap: int = 0

    def connect(self, stack: Any) -> None:
        """Adapters of the stack that runs now."""
        os.environ.update(stack.env)
        wiring.settings.cache_clear()
        self.config: Settings = wiring.settings()
        self.store = wiring.store(self.config)
        self.engine: Engine = wiring.engines(self.config)[0]
        self.runner = Cycles(stack.env, self.options.home / "logs", self.config, self.store)


def tell(options: Options, local: Local) -> None:
    """Run the whole demo and write ``report.json`` and ``acceptance.png`` into its folder.

    Raises:
        TrafficError: a traffic file is missing, empty or malformed.
        ServiceError: a part did not start, or a cycle did not do what the story needs; says what it decided and why.
    """
    began = time.monotonic()
    story = _open(options)
    _clear(options.home)
    _write_policy(story, story.plan.static_steps)
    engine = {"steps": 0, "draft_tokens": 1, "threads": 2, "plugin_env": _plugin_env()}
    env = {"TIDE_POLICY_FILE": str(_policy_path(story)), "TIDE_TRAIN_THREADS": "2"}
    with story.progress.step("start"), ExitStack() as parts:
        story.connect(parts.enter_context(local.running(options.home, engine, env, story.progress.say)))
        ending = parts.pop_all()
    with ending:
        cached = statics.find(options.home, _static_key(story))
        _serve_without_draft(story, reduced=cached is not None)
        _first_cycle(story, cached)
        _serve_baseline(story)
        _shift(story)
        _second_cycle(story)
        results, speed = _measure(story, local)
        capture = story.runner.capture_totals()
    report = _report(story, began, results, speed, capture)
    path, picture = reports.write(report, options.home, story.served, story.marks)
    story.progress.say("\n" + reports.table(report) if not options.fast else "shortened: no ratios are reported")
    story.progress.say(f"report: {path}\npicture: {picture}")
    story.progress.say(f"look at the data in lakeFS: tide up --home {options.home}")


def _open(options: Options) -> Story:
    before = read_traffic_file(options.before) if options.before else load_workload("chat")
    after = read_traffic_file(options.after) if options.after else load_workload("functions")
    after, held_out = split_for_measuring(after, min(MEASURED_PROMPTS, max(2, len(after) // 4)))
    plan = plans.FAST if options.fast else plans.FULL
    if plan.gate_share is not None:
        before, after = (with_gate_share(prompts, plan.gate_share, _split) for prompts in (before, after))
    return Story(options, plan, Progress(list(plan.seconds.items())), before, after, held_out)


def _split(conversation: str) -> Split:
    return split_of(conversation_hash(HASH_KEY.encode(), conversation))


def _clear(home: Path) -> None:
    """A fresh store each time; models and the static draft are reused by digest."""
    home.mkdir(parents=True, exist_ok=True)
    shared = home.parent / "models"
    if shared.is_dir() and not (home / "models").exists():
        (home / "models").symlink_to(shared, target_is_directory=True)
    for item in home.iterdir():
        if item.name in KEPT or item.name == "run":
            continue
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()


def _plugin_env() -> dict[str, str]:
    return {"TIDE_SHARD_AGE_S": "4", "TIDE_PROMPT_ROWS": "32", "TIDE_HASH_KEY": HASH_KEY}


def _policy_path(story: Story) -> Path:
    return story.options.home / "policy.yaml"


def _write_policy(story: Story, steps: int) -> None:
    _policy_path(story).write_text(yaml.safe_dump(plans.policy(story.plan, steps).model_dump(mode="json")))


def _take(prompts: Sequence[Prompt], start: int, count: int) -> list[Prompt]:
    """``count`` prompts from ``start`` on, around the end when there are too few."""
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


def _load(story: Story, prompts: Sequence[Prompt], workload: str, detail: Callable[[str], None]) -> LoadResult:
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
    time.sleep(float(_plugin_env()["TIDE_SHARD_AGE_S"]) + story.config.policy().capture.window_s + 2.0)


def _serve_without_draft(story: Story, *, reduced: bool) -> None:
    with story.progress.step("serve without a draft") as detail:
        count = max(story.plan.first_requests // 3, 24) if reduced else story.plan.first_requests
        _load(story, _take(story.before, 0, count), "before", detail)
        _settle(story)


def _static_key(story: Story) -> str:
    policy = plans.policy(story.plan, story.plan.static_steps)
    served = _take(story.before, 0, story.plan.first_requests)
    return statics.key(story.config.bundle, policy, served, story.plan.first_tokens)


def _first_cycle(story: Story, cached: Path | None) -> None:
    """The published system's own case: no draft, enough traffic. The first promotion restarts the server."""
    with story.progress.step("first cycle") as detail:
        began = time.monotonic()
        branch = _promote_cached(story, cached, detail) if cached else _adapt(story, detail)
        cycle = story.runner.read(branch, time.monotonic() - began, reused=cached is not None)
        _require_promotion(story, cycle, "static draft")
        if cached is None:
            statics.keep(story.options.home, _static_key(story), story.config.home / "drafts" / cycle.candidate.digest)


def _promote_cached(story: Story, cached: Path, detail: Callable[[str], None]) -> str:
    draft = statics.record(cached)
    branch = f"candidate-cached-{draft.digest[:12]}"
    story.progress.say(f"   static draft {draft.digest[:12]} of an earlier run is judged again, not trained again")
    story.runner.run("harvest", detail)
    candidates.publish(story.store, story.config.drafts_repository, branch, cached, draft, None)
    story.runner.run("promote", detail, branch=branch)
    return branch


def _adapt(story: Story, detail: Callable[[str], None], background: BackgroundLoad | None = None, **params: str) -> str:
    """Run `adapt/adapt`; returns the branch of its candidate, or '' when the drift gate did not ask for one."""
    known, fresh = story.runner.candidate_branches(), [""]

    def poll() -> None:
        if not fresh[0] and (new := story.runner.candidate_branches() - known):
            fresh[0] = new.pop()
            if background:
                background.press()

    story.runner.run("adapt", detail, poll, **params)
    poll()
    drift = story.runner.newest_drift()
    if drift:
        story.progress.say(f"   drift gate: {drift.decision} ({drift.cause or '-'}): {'; '.join(drift.reasons)}")
    return fresh[0]


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


def _serve_baseline(story: Story) -> None:
    with story.progress.step("serve with the static draft") as detail:
        start = story.plan.first_requests
        _load(story, _take(story.before, start, story.plan.baseline_requests), "before", detail)


def _shift(story: Story) -> None:
    with story.progress.step("shift the traffic") as detail:
        story.marks.append(reports.Mark(at=time.time(), label="traffic shifts"))
        _load(story, _take(story.after, 0, story.plan.shifted_requests), "after", detail)
        _settle(story)


def _second_cycle(story: Story) -> None:
    """The drift gate looks once, more traffic comes, it looks again and fires; the draft is swapped in under load."""
    with story.progress.step("second cycle") as detail:
        _write_policy(story, story.plan.adapted_steps)
        began = time.monotonic()
        rest = _take(story.after, story.plan.shifted_requests, story.plan.second_look_requests)
        branch = _adapt_under_load(story, detail)
        if not branch:
            _load(story, rest, "after", detail)
            _settle(story)
            branch = _adapt_under_load(story, detail)
        if not branch:
            story.progress.say("   the drift gate did not ask for a draft in two looks; training one all the same")
            branch = _adapt_under_load(story, detail, force="true")
        _require_promotion(story, story.runner.read(branch, time.monotonic() - began), "adapted draft")


def _adapt_under_load(story: Story, detail: Callable[[str], None], **params: str) -> str:
    with BackgroundLoad(
        story.engine, story.after, workload="after", max_new_tokens=story.plan.shifted_tokens, pause_s=60.0
    ) as background:
        branch = _adapt(story, detail, background, **params)
        time.sleep(5.0)  # a few answers after the swap belong on the picture
    story.served += background.served
    story.failed_during_swap += background.failed
    return branch


def _measure(story: Story, local: Local) -> tuple[dict[str, ArmResult], float | None]:
    """No speculation, static and adapted draft on held-out prompts of the shifted workload, interleaved."""
    with story.progress.step("measure") as detail:
        url = local.start_plain_engine(story.options.home, story.progress.say)
        plain = SglangEngine(url, name="plain", admin_key=story.config.admin_key)
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
    swap = story.cycles[-1].promotion
    return reports.Report(
        wall_s=time.monotonic() - began,
        machine=reports.machine(),
        reference_speed_ratio=speed / reports.REFERENCE_TOKENS_PER_S if speed else None,
        cycles=tuple(story.cycles),
        held_out=results,
        ratios={} if story.options.fast else reports.compared(results),
        capture=capture,
        swap_s=swap.replicas[0].seconds if swap else None,
        swap_failed_requests=story.failed_during_swap,
        fast=story.options.fast,
    )
