"""The drafts of the corpus: what each is trained on, from which parent, for how long, with which seed.

Owns the recipe. Drafts that differ in the seed alone share a name up to ``-seed``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tide.domain import Shard, TrainingConfig
from tide.files import write_durably
from tide.models.draft_files import load_draft
from tide.states.shards import read_manifest
from tide.trainer.base import TrainingData
from tide.trainer.specforge import SpecForgeTrainer


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    workload: str
    steps: int
    parent: str | None = "chat"
    seed: int = 0


RECIPES: Final = {
    "chat": Recipe("chat", 200, parent=None),
    "chat-seed1": Recipe("chat", 60, seed=1),
    "chat-seed2": Recipe("chat", 60, seed=2),
    "functions-seed1": Recipe("functions", 90, seed=1),
    "functions-seed2": Recipe("functions", 90, seed=2),
    "code": Recipe("code", 70),
}


def train_all(home: Path, bundle: Path, share: float, say: Callable[[str], None]) -> None:
    """Train what is missing; ``drafts.json`` says what each draft is."""
    path = home / "drafts.json"
    made: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name, recipe in RECIPES.items():
        if name not in made:
            made[name] = train(home, bundle, name, recipe, made, share)
            write_durably(path, json.dumps(made, indent=1).encode())
            say(f"trained {name}: loss {made[name]['loss']:.3f} in {made[name]['seconds']:.0f} s")


def train(
    home: Path, bundle: Path, name: str, recipe: Recipe, made: dict[str, dict[str, Any]], share: float
) -> dict[str, Any]:
    """One run; the last checkpoint is kept."""
    shards = {p: read_manifest(p) for p in sorted((home / "spool" / "train").glob("*.safetensors"))}
    chosen = sorted((s.closed_at, p) for p, s in shards.items() if _workloads(s) == {recipe.workload})
    workdir = home / "runs" / name
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    result = SpecForgeTrainer().train(
        TrainingData(shards=tuple(p for _, p in chosen), target=shards[chosen[0][1]].target),
        TrainingConfig(
            epochs=50,
            max_steps=max(2, round(recipe.steps * share)),
            learning_rate=2e-3,
            prompt_rows=32,
            checkpoints=1,
            seed=recipe.seed,
        ),
        parent=home / "drafts" / made[recipe.parent]["digest"] if recipe.parent else None,
        bundle=bundle,
        workdir=workdir,
        on_progress=lambda _: None,
    )
    last = result.checkpoints[-1]
    load_draft(last.draft, expected=last.digest)
    shutil.copytree(last.draft, home / "drafts" / last.digest, dirs_exist_ok=True)
    shutil.rmtree(workdir)
    return {
        "digest": last.digest,
        "trained_on": recipe.workload,
        "parent": recipe.parent,
        "seed": recipe.seed,
        "steps": last.step,
        "tokens": result.tokens,
        "samples": result.samples,
        "loss": result.final_loss,
        "seconds": round(result.seconds, 1),
    }


def _workloads(shard: Shard) -> set[str]:
    return {request.slice for request in shard.requests}
