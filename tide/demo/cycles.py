"""Running a flow as a user does (`prefect deployment run`), and reading back from the store what it saw and did.

Owns the command and what is read where. Knows nothing of the story around it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tide import repositories
from tide.config import Settings
from tide.demo.report import Cycle
from tide.domain import DraftModel, DriftReport, Promotion, Verdict, WindowManifest
from tide.errors import NotFound, ServiceError
from tide.lineage import ledger
from tide.prefect_runs import PrefectRuns
from tide.serving import rollout
from tide.serving.serving_file import candidate_on
from tide.states import snapshots, window_branch
from tide.states.spool import sum_counts
from tide.store.base import Store

_STEP = re.compile(r"step \d+/\d+ .*|drift: .*|acceptance length .*")


class Cycles:
    """Cycles of one running stack.

    Args:
        env: settings of the stack, as environment variables.
        logs: folder of the workers' logs, where training reports its steps.
    """

    def __init__(self, env: Mapping[str, str], logs: Path, config: Settings, store: Store) -> None:
        self._env, self._logs, self._config, self._store = dict(env), logs, config, store

    def run(
        self, flow: str, detail: Callable[[str], None], poll: Callable[[], None] = lambda: None, **params: str
    ) -> None:
        """Run a deployment and follow it to its end.

        Args:
            detail: takes what the run is doing now.
            poll: called about once a second meanwhile.

        Raises:
            ServiceError: the run did not complete; the message has the end of what Prefect said.
        """
        flags = [part for key, value in params.items() for part in ("--param", f"{key}={value}")]
        prefect = str(Path(sys.executable).with_name("prefect"))
        positions = {log: log.stat().st_size for log in self._logs.glob("worker-*.log")}
        output = self._logs / f"demo-{flow}.log"
        with output.open("w") as out:
            run = subprocess.Popen(
                [prefect, "deployment", "run", f"{flow}/{flow}", "--watch", *flags],
                env={**os.environ, **self._env},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                while run.poll() is None:
                    time.sleep(1.0)
                    poll()
                    self._follow(positions, detail)
            finally:
                run.terminate()
        if run.returncode:
            raise ServiceError(f"flow {flow} did not complete: {output.read_text()[-1500:]}\nsee {self._logs}")

    def follow(self, flow: str, detail: Callable[[str], None]) -> None:
        """Wait until the runs of a flow that another one started have ended; at once when there are none.

        Raises:
            ServiceError: the newest did not complete, or one waits for a person, whom the demo does not have.
        """
        runs = PrefectRuns(self._env["PREFECT_API_URL"], self._env.get("PREFECT_API_AUTH_STRING", ""))
        positions = {log: log.stat().st_size for log in self._logs.glob("worker-*.log")}
        found = runs.of_flow(flow)
        while not all(run.final for run in found):
            if waiting := [run.id for run in found if run.type == "PAUSED"]:
                raise ServiceError(f"run {waiting[0]} of {flow} waits for approval: the demo's policy asks nobody")
            time.sleep(1.0)
            self._follow(positions, detail)
            found = runs.of_flow(flow)
        if found and found[0].type != "COMPLETED":
            raise ServiceError(
                f"flow {flow} did not complete: run {found[0].id} is {found[0].state}: {found[0].message[:1500]}\n"
                f"see {self._logs}"
            )

    def _follow(self, positions: dict[Path, int], detail: Callable[[str], None]) -> None:
        for log in self._logs.glob("worker-*.log"):
            with log.open("rb") as file:
                file.seek(positions.get(log, 0))
                text = file.read().decode(errors="replace")
                positions[log] = file.tell()
            if found := _STEP.findall(text):
                detail(found[-1])

    def candidate_branches(self) -> set[str]:
        """Branches of the drafts repository that hold candidates."""
        try:
            return set(repositories.candidate_branches(self._store, self._config.drafts_repository))
        except NotFound:
            return set()

    def newest_drift(self) -> DriftReport | None:
        """The latest decision of the drift gate."""
        return ledger.newest(self._store, self._config.drafts_repository, "drift", DriftReport)

    def has_verdict(self, branch: str) -> bool:
        """True once the promotion gate has spoken about the candidate on a branch."""
        return self._store.head(self._config.drafts_repository, branch).metadata.get("tide.kind") == "verdict"

    def read(self, branch: str, seconds: float, *, reused: bool = False) -> Cycle:
        """What the cycle that made or judged a branch saw and did."""
        store, repository = self._store, self._config.drafts_repository
        digest = candidate_on(store, repository, branch)
        prefix = rollout.draft_prefix(digest)
        verdict = Verdict.model_validate_json(store.read(repository, branch, f"{prefix}verdict.json"))
        return Cycle(
            snapshot=snapshots.describe(store, self._config.states_repository, verdict.states_commit),
            drift=None if reused else self.newest_drift(),
            candidate=DraftModel.model_validate_json(store.read(repository, branch, f"{prefix}draft.json")),
            verdict=verdict,
            promotion=self._promotion(digest),
            reused=reused,
            seconds=seconds,
        )

    def capture_totals(self) -> dict[str, Any]:
        """What was captured and harvested in all: ``tokens`` (rows), and ``dropped`` and ``excluded`` by reason."""
        repository = self._config.states_repository
        found = [
            WindowManifest.model_validate_json(self._store.read(repository, "main", item.path))
            for item in self._store.list(repository, "main", window_branch.ROOT)
            if item.path.endswith("/manifest.json")
        ]
        return {
            "tokens": sum(m.rows for m in found),
            "requests": sum(m.requests for m in found),
            "dropped": sum_counts(m.dropped for m in found),
            "excluded": sum_counts(m.excluded for m in found),
            "quarantined": sum(len(m.quarantined) for m in found),
        }

    def _promotion(self, digest: str) -> Promotion | None:
        serving = rollout.read_serving(self._store, self._config.drafts_repository)
        if serving.stable is None or serving.stable.digest != digest:
            return None
        path = f"promotions/{serving.generation:06d}.json"
        return Promotion.model_validate_json(self._store.read(self._config.drafts_repository, "main", path))
