"""The setting of the demo: what was asked for, the parts it is told with, its folder and its policy.

Owns what is kept from one telling to the next. Knows nothing of the order of things.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tide import wiring
from tide.config import Settings
from tide.demo import plan as plans
from tide.demo import report as reports
from tide.demo import statics
from tide.demo.cycles import Cycles
from tide.demo.load import Served
from tide.demo.progress import Progress
from tide.demo.traffic import Prompt, load_workload, read_traffic_file, split_for_measuring, with_gate_share
from tide.domain import Split, split_of
from tide.engine.base import Engine
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
    end_pipeline: Callable[[Path, Callable[[str], None]], None]
    """Ends everything but the engines."""


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


def open_story(options: Options) -> Story:
    """Read the traffic and choose the sizes.

    Raises:
        TrafficError: a traffic file is missing, empty or malformed.
    """
    before = read_traffic_file(options.before) if options.before else load_workload("chat")
    after = read_traffic_file(options.after) if options.after else load_workload("functions")
    after, held_out = split_for_measuring(after, min(MEASURED_PROMPTS, max(2, len(after) // 4)))
    plan = plans.FAST if options.fast else plans.FULL
    if plan.gate_share is not None:
        before, after = (with_gate_share(prompts, plan.gate_share, _split) for prompts in (before, after))
    return Story(options, plan, Progress(list(plan.seconds.items())), before, after, held_out)


def _split(conversation: str) -> Split:
    return split_of(conversation_hash(HASH_KEY.encode(), conversation))


def clear(home: Path) -> None:
    """A fresh store each time; models and the static draft are reused by digest."""
    home.mkdir(parents=True, exist_ok=True)
    shared = home.parent / "models"
    if shared.is_dir() and not (home / "models").exists():
        (home / "models").symlink_to(shared, target_is_directory=True)
    for item in home.iterdir():
        if item.name in KEPT or item.name == "run":
            continue
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()


def plugin_env() -> dict[str, str]:
    """Settings of the plugin: short clocks, and hashes that are the same in each telling."""
    return {"TIDE_SHARD_AGE_S": "4", "TIDE_PROMPT_ROWS": "32", "TIDE_HASH_KEY": HASH_KEY}


def policy_path(story: Story) -> Path:
    """Where the flows find the policy of the cycle to come."""
    return story.options.home / "policy.yaml"


def write_policy(story: Story, steps: int) -> None:
    """The policy of the next cycle: so many optimiser steps."""
    policy_path(story).write_text(yaml.safe_dump(plans.policy(story.plan, steps).model_dump(mode="json")))


def take(prompts: Sequence[Prompt], start: int, count: int) -> list[Prompt]:
    """``count`` prompts from ``start`` on, around the end when there are too few."""
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


def static_key(story: Story) -> str:
    """What the static draft of this telling is kept by."""
    policy = plans.policy(story.plan, story.plan.static_steps)
    served = take(story.before, 0, story.plan.first_requests)
    return statics.key(story.config.bundle, policy, served, story.plan.first_tokens)
