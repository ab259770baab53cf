"""`dvc repro` from nothing but a lock file, on the real store and the real trainer; and what an experiment reruns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.lakefs.server import LakefsServer
from tests.support.tiny import request_info
from tests.support.tiny_target import tiny_target, tiny_target_states
from tide import pinned
from tide.domain import Split
from tide.models.target_files import bundle_contract
from tide.states.shards import write_shard
from tide.store.lakefs import LakefsStore
from tide.trainer.specforge import SpecForgeTrainer

REPOSITORY = Path(__file__).parents[2]
SERVICE = "experiment"
SMALL: dict[str, Any] = {
    "train": {"max_steps": 6, "epochs": 4, "ttt_length": 2, "draft_vocab_size": 256, "prompt_rows": 4, "checkpoints": 2}
}


@dataclass
class Project:
    """A checkout as `git clone` leaves it, with the settings of a store."""

    folder: Path
    env: Mapping[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env={**os.environ, **self.env}, capture_output=True, text=True, check=False
        )

    def dvc(self, *arguments: str) -> str:
        done = self.run(sys.executable, "-m", "dvc", *arguments)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "build" / "experiment" / name).read_text())
        return found


def _publish(store: LakefsStore, model: Path, bundle: Path, folder: Path) -> None:
    """One window of each split."""
    made = tiny_target_states(model, 28)
    repository, at = f"{SERVICE}-states", "windows/20260101T000000Z/r0"
    store.create_repository(repository)
    for split, chosen in ((Split.TRAIN, made[:16]), (Split.GATE, made[16:24]), (Split.SELECTION, made[24:])):
        states = [replace(s, info=request_info(f"{split}-{i}", split)) for i, s in enumerate(chosen)]
        shard = write_shard(folder, states, split=split, target=bundle_contract(bundle), opened_at=1.0, closed_at=2.0)
        for name in (shard.file, f"{shard.name}.json"):
            store.put(repository, "main", f"{at}/{split.folder}/{name}", folder / name)
    store.commit(repository, "main", "harvest", {})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, lakefs_server: LakefsServer) -> Project:
    root = tmp_path_factory.mktemp("experiment")
    model, keys = tiny_target(root / "target"), lakefs_server.credentials
    bundle = SpecForgeTrainer().prepare_bundle(model, root / "bundle")
    store = LakefsStore(lakefs_server.endpoint, keys.access_key, keys.secret_key)
    _publish(store, model, bundle, root / "shards")
    checkout = root / "checkout"
    for name in ("tide", "data", ".dvc"):
        shutil.copytree(
            REPOSITORY / name, checkout / name, ignore=shutil.ignore_patterns("tmp", "cache", "__pycache__")
        )
    for name in ("dvc.yaml", ".dvcignore", ".gitignore", "requirements.lock"):
        shutil.copy(REPOSITORY / name, checkout / name)
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    params["train"] |= SMALL["train"]
    (checkout / "params.yaml").write_text(yaml.safe_dump(params))
    pinned.pin(store, f"{SERVICE}-states", f"{SERVICE}-drafts", "main", checkout / pinned.LOCK)
    env = {
        "TIDE_SERVICE": SERVICE,
        "TIDE_LAKEFS_ENDPOINT": lakefs_server.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": keys.access_key,
        "TIDE_LAKEFS_SECRET_KEY": keys.secret_key,
        "TIDE_TARGET_BUNDLE": str(bundle),
        "DVC_NO_ANALYTICS": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    made = Project(checkout, env)
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "clone")):
        assert made.run("git", *command).returncode == 0
    return made


def test_repro_trains_evaluates_and_reports_on_the_pinned_commit_and_is_done_the_second_time(project: Project) -> None:
    project.dvc("repro")
    splits, training, metrics = (project.read(f"{name}.json") for name in ("split", "training", "metrics"))
    assert {name: found["requests"] for name, found in splits.items()} == {"gate": 8, "selection": 4, "train": 16}
    assert (project.folder / "build/experiment/draft" / training["digest"] / "model.safetensors").is_file()
    assert training["selection_acceptance_length"] >= 1.0
    assert metrics["requests"] == 8
    assert metrics["outcome"] in ("promote", "reject", "inconclusive")
    assert f"{training['digest'][:12]} against none" in (project.folder / "build/experiment/report.md").read_text()
    before = (project.folder / "build/experiment/training.json").stat().st_mtime_ns
    assert "up to date" in project.dvc("repro")
    assert (project.folder / "build/experiment/training.json").stat().st_mtime_ns == before


def test_an_experiment_reruns_only_what_its_parameter_changes_and_can_be_compared(project: Project) -> None:
    project.dvc("repro")
    trained = project.read("training.json")
    assert project.read("metrics.json")["outcome"] != "inconclusive"
    project.dvc("exp", "run", "--name", "strict", "-S", "promotion.min_requests=50")
    assert project.read("metrics.json")["outcome"] == "inconclusive"
    assert project.read("training.json") == trained
    shown = project.dvc("exp", "show", "--csv")
    assert "strict" in shown
    assert "acceptance_length" in shown
