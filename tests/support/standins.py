"""Stand-ins for what is too dear to kill fifty times: engine, trainer and evaluator, honest about everything around.

The engine's draft lies in a file, so that every process sees one replica; the trainer is a real process group that
writes real draft files; the evaluator finds every draft that does not serve yet better than the one that does. No
acceptance is measured here. Each training is logged, with its inputs, in ``<home>/trainings.jsonl``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from tests.fakes.fake_engine import NO_DRAFT, FakeEngine
from tests.support.spool_shape import HIDDEN, TARGET, VOCAB
from tide import wiring
from tide.config import Settings
from tide.domain import (
    EvalReport,
    RequestScore,
    Shard,
    Split,
    TargetContract,
    TrainingConfig,
    TrainingProgress,
    split_of,
)
from tide.engine.base import Engine, SwapResult
from tide.evaluator.base import Evaluator
from tide.files import write_durably
from tide.recovery.ownership import claim
from tide.serving import rollout
from tide.trainer.base import (
    Checkpoint,
    Finding,
    Preflight,
    ProgressCallback,
    Trainer,
    TrainingData,
    TrainingResult,
)
from tide.trainer.process import GroupProcess, sigterm_cancels

TRAIN_S = "DRILL_TRAIN_S"
"""Environment variable: seconds a training takes; negative: it hangs."""
_RANKS = """
import subprocess, sys, time
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
child = subprocess.Popen(sleeps, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
seconds, step = float(sys.argv[1]), 0
while seconds < 0 or step * 0.25 < seconds:
    time.sleep(0.25)
    if child.poll() is not None:
        sys.exit("a rank died")
    step += 1
    if seconds >= 0:
        print(step, flush=True)
child.kill()
child.wait()
"""


class FileEngine(FakeEngine):
    """A replica whose active draft is the content of a file; without the file it has just started, without a draft."""

    def __init__(self, name: str, home: Path) -> None:
        super().__init__(name, acceptance={}, target=TARGET)
        self._file = home / "replicas" / name

    def active_draft(self) -> str:
        return self._file.read_text() if self._file.exists() else NO_DRAFT

    def swap_draft(self, digest: str) -> SwapResult:
        before = self.active_draft()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._file, digest.encode())
        self._draft = digest
        return SwapResult(before=before, after=digest, seconds=0.0)


class StandInTrainer(Trainer):
    """Trains nothing: a process group of two, for as long as a training, then a draft that its inputs determine."""

    def train(
        self,
        data: TrainingData,
        config: TrainingConfig,
        *,
        parent: Path | None,
        bundle: Path,
        workdir: Path,
        on_progress: ProgressCallback,
    ) -> TrainingResult:
        names = sorted(path.stem for path in data.shards)
        key = hashlib.sha256("\n".join([*names, parent.name if parent else ""]).encode()).hexdigest()
        _log("start", key)
        seconds = os.environ.get(TRAIN_S, "2")
        with (
            sigterm_cancels(),
            GroupProcess(
                [sys.executable, "-S", "-c", _RANKS, seconds],
                mark=claim(workdir).token,
                env=os.environ,
                log=workdir / "standin.log",
                cwd=workdir,
            ) as process,
        ):
            for line in process.lines():
                if line:
                    on_progress(TrainingProgress(step=int(line), total_steps=100, loss=1.0, eta_s=None))
            process.check_exit()
        folder, digest = _write_draft(workdir / "drafts", seed=int(key[:8], 16))
        _log("end", key, digest)
        return TrainingResult(
            checkpoints=(Checkpoint(step=1, draft=folder, digest=digest),),
            samples=len(names),
            tokens=1000,
            refused=(),
            vocabulary_rechosen=False,
            coverage=1.0,
            final_loss=1.0,
            seconds=float(seconds),
            environment={"trainer": "stand-in"},
        )

    def preflight(
        self,
        config: TrainingConfig,
        *,
        target: TargetContract,
        tokens: int,
        parent: Path | None,
        bundle: Path,
        workdir: Path,
        rehearse: bool | None = None,
    ) -> Preflight:
        return Preflight(findings=(Finding(name="devices", state="ok", detail="a stand-in trains on none"),))

    def prepare_bundle(self, model: Path, destination: Path, dtype: str | None = None) -> Path:
        raise NotImplementedError


class StandInEvaluator(Evaluator):
    """Acceptance 1.4 of the draft in serving and 1.8 of any other, on the gate requests that the shards hold."""

    def evaluate(
        self,
        draft: Path,
        shards: Sequence[Path],
        *,
        bundle: Path,
        split: Split,
        steps: int,
        topk: int = 1,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
        states_commit: str = "",
    ) -> EvalReport:
        config = wiring.settings()
        serving = rollout.read_serving(wiring.store(config), config.drafts_repository).stable
        length = 1.4 if serving and serving.digest == draft.name else 1.8
        manifests = [Shard.model_validate_json(path.with_suffix(".json").read_bytes()) for path in shards]
        requests = [r for m in manifests for r in m.requests if split_of(r.conversation) is split]
        scores = tuple(
            RequestScore(
                request=r.request,
                conversation=r.conversation,
                slice="chat",
                tokens=240,
                verify_steps=(verify := round(240 / length) + int(r.request[-1], 16) % 5),
                proposed=steps * verify,
                accepted=240 - verify,
            )
            for r in requests
        )
        return EvalReport(
            draft=draft.name,
            contract=None,
            target=TARGET,
            states_commit=states_commit,
            steps=steps,
            topk=topk,
            sampling="greedy",
            scores=scores,
        )

    def walk(
        self,
        draft: Path,
        shards: Sequence[Path],
        requests: AbstractSet[str],
        *,
        bundle: Path,
        steps: int,
        topk: int = 1,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> list[RequestScore]:
        raise NotImplementedError("a drill has no traffic for a canary to be watched on: its policy asks for no watch")


def _write_draft(parent: Path, seed: int) -> tuple[Path, str]:
    from tests.support.drafts import draft_config, draft_tensors  # torch takes seconds, and most flows need none
    from tide.models.draft_files import write_draft

    shape: dict[str, Any] = {"vocab_size": VOCAB, "draft_vocab_size": 16, "target_hidden_size": HIDDEN}
    settings = draft_config(**shape)
    return write_draft(parent, settings, draft_tensors(settings, seed=seed))


def engines(config: Settings) -> list[Engine]:
    """In place of `wiring.engines`."""
    return [FileEngine(name, config.home) for name in config.replica_urls]


def install() -> None:
    """Put the stand-ins behind their ports in this process."""
    wiring.engines = engines
    wiring.trainer = StandInTrainer
    wiring.evaluator = StandInEvaluator


def _log(what: str, key: str, digest: str = "") -> None:
    line = json.dumps({"what": what, "key": key, "digest": digest, "at": time.time(), "pid": os.getpid()})
    with (wiring.settings().home / "trainings.jsonl").open("a") as file:
        file.write(line + "\n")
