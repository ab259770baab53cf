"""The reconcile flow and its stages: every check is made, whatever another finds or raises, and all is reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import reconcile as module
from tasks import reconcile as stages
from tasks.reconcile import end_orphans, mend_branches, mend_runs, mend_slots, record_reconcile, tidy_scratch
from tests.fakes.memory_store import MemoryStore
from tide import repositories, wiring
from tide.config import Settings
from tide.errors import ServiceError
from tide.lineage import ledger
from tide.recovery import ownership
from tide.recovery.rules import Patience, ReconcileReport, Repair, RunView, SlotView

DRAFTS = "svc-drafts"
AT_ONCE = Patience(silent_s=1, second_look_s=0, pending_s=1, ended_s=0, scratch_s=0)


class Server:
    """What Prefect would answer."""

    def __init__(self) -> None:
        self.runs: dict[str, RunView] = {}
        self.readings: list[list[SlotView]] = []
        self.crashed: list[str] = []
        self.freed: list[tuple[str, int]] = []

    def at_work(self) -> list[RunView]:
        return [run for run in self.runs.values() if run.state in {"PENDING", "RUNNING", "CANCELLING"}]

    def run(self, id: str) -> RunView | None:
        return self.runs.get(id)

    def crash(self, run: RunView, _why: str) -> bool:
        self.crashed.append(run.id)
        return True

    def slots(self) -> list[SlotView]:
        return self.readings.pop(0)

    def free(self, slot: SlotView, count: int) -> None:
        self.freed.append((slot.deployment, count))


def run(id: str, state: str = "RUNNING", since: float = 0.0, flow: str = "adapt") -> RunView:
    return RunView(id=id, name=f"run-{id}", flow=flow, deployment="d", state=state, since=since)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    repositories.ensure_drafts(store, DRAFTS)
    return store


@pytest.fixture
def server(tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Server:
    found, config = Server(), Settings(service="svc", home=tmp_path, _env_file=None)

    @contextmanager
    def connected() -> Iterator[Server]:
        yield found

    monkeypatch.setattr(stages, "server", connected)
    monkeypatch.setattr(stages, "BETWEEN_READINGS_S", 0.0)
    monkeypatch.setattr(wiring, "settings", lambda: config)
    monkeypatch.setattr(wiring, "store", lambda _: store)
    return found


def test_a_silent_run_is_crashed_and_one_that_waits_is_not(server: Server) -> None:
    server.runs = {"a": run("a"), "b": run("b", "PAUSED"), "c": run("c", since=time.time() + 60)}
    [repair] = mend_runs.fn(AT_ONCE, False)
    assert server.crashed == ["a"]
    assert (repair.kind, repair.outcome) == ("run", "mended")


def test_a_dry_run_changes_nothing_and_says_what_it_would(server: Server) -> None:
    server.runs, server.readings = {"a": run("a")}, [[slots(1)], [slots(1)]]
    assert [r.outcome for r in mend_runs.fn(AT_ONCE, True) + mend_slots.fn(True)] == ["left", "left"]
    assert (server.crashed, server.freed) == ([], [])


def slots(held: int, *runs: str) -> SlotView:
    return SlotView(deployment="adapt/adapt", limit="deployment:1", held=held, runs=frozenset(runs))


def test_a_leaked_slot_is_given_back_once(server: Server) -> None:
    server.readings = [[slots(1)], [slots(1)], [slots(0)]]
    assert [r.outcome for r in mend_slots.fn(False)] == ["mended"]
    assert mend_slots.fn(False) == []
    assert server.freed == [("adapt/adapt", 1)]


def test_a_slot_that_is_taken_between_the_readings_is_nobodys_leak(server: Server) -> None:
    server.readings = [[slots(1)], [slots(1, "new")]]
    assert mend_slots.fn(False) == []
    assert server.freed == []


@contextmanager
def training(home: Path, flow_run: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    folder = home / "train" / flow_run
    folder.mkdir(parents=True)
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    owner = ownership.claim(folder, flow_run)
    with subprocess.Popen(sleeps, env={**os.environ, ownership.MARK: owner.token}) as process:
        try:
            while process.pid not in ownership.members(owner):
                time.sleep(0.01)
            yield folder, process
        finally:
            process.kill()


def test_the_training_of_a_run_that_is_over_is_ended_and_that_of_a_running_one_is_not(
    server: Server, tmp_path: Path
) -> None:
    with training(tmp_path, "over") as (folder, dead), training(tmp_path, "works") as (_, lives):
        server.runs = {"over": run("over", "CANCELLED", since=time.time() - 5), "works": run("works")}
        [repair] = end_orphans.fn(AT_ONCE, False)
        assert dead.wait(5) < 0
        assert lives.poll() is None
        assert (repair.subject, repair.outcome) == (folder.name, "mended")
        assert end_orphans.fn(AT_ONCE, False) == []


def test_scratch_of_a_dead_run_goes_and_that_of_a_living_flow_stays(server: Server, tmp_path: Path) -> None:
    with training(tmp_path, "works") as (folder, _):
        owner = ownership.read_owner(folder)
        assert owner is not None
        dead = tmp_path / "train" / "dead"
        dead.mkdir()
        (dead / ownership.FILE).write_text(owner.model_copy(update={"pid": 2**22 + 1, "token": "x"}).to_json())
        elsewhere = tmp_path / "train" / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / ownership.FILE).write_text(owner.model_copy(update={"host": "another"}).to_json())
        old, new = tmp_path / "train" / "old", tmp_path / "train" / "new"
        for strange in (old, new):
            strange.mkdir()
        os.utime(old, (1.0, 1.0))
        hour = AT_ONCE.model_copy(update={"scratch_s": 3600})
        assert [r.subject for r in tidy_scratch.fn(hour, False)] == ["old"]
        assert [r.subject for r in tidy_scratch.fn(AT_ONCE, False)] == ["dead", "new"]
        assert {path.name for path in (tmp_path / "train").iterdir()} == {folder.name, "elsewhere"}


def test_half_made_branches_are_mended_when_nothing_that_uses_them_is_at_work(
    server: Server, store: MemoryStore
) -> None:
    store.create_branch(DRAFTS, "candidate-empty", "main")
    server.runs = {"a": run("a", flow="train")}
    assert mend_branches.fn(False) == []
    server.runs = {}
    assert [r.outcome for r in mend_branches.fn(False)] == ["mended"]
    assert "candidate-empty" not in list(store.branches(DRAFTS))


@pytest.mark.parametrize(("outcome", "written"), [("mended", 1), ("failed", 1), ("left", 0)])
def test_the_ledger_gets_a_report_when_something_was_mended_or_could_not_be(
    server: Server, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, outcome: Any, written: int
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(stages, "create_markdown_artifact", lambda **fields: shown.append(fields["markdown"]))
    monkeypatch.setattr(stages, "get_run_logger", lambda: SimpleNamespace(warning=lambda *_: None))
    report = record_reconcile.fn([Repair(kind="run", subject="x", found="y", outcome=outcome)])
    assert len(ledger.every(store, DRAFTS, stages.KIND, ReconcileReport)) == written
    assert report.repairs[0].outcome == outcome
    assert "| run | `x` | y |" in shown[0]


class Check:
    """Stands in for a stage."""

    def __init__(self, found: list[Repair] | Exception) -> None:
        self.found = found

    def __call__(self, *_: object, return_state: bool) -> Any:
        assert return_state
        failed = isinstance(self.found, Exception)
        return SimpleNamespace(
            is_completed=lambda: not failed, result=lambda: self.found, message=str(self.found), name="Failed"
        )


def test_one_check_that_fails_keeps_no_other_from_its_work_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Repair(kind="slot", subject="s", found="f", outcome="mended")
    names = (
        "mend_runs",
        "mend_slots",
        "end_orphans",
        "tidy_scratch",
        "mend_branches",
        "mend_approvals",
        "mend_replicas",
    )
    for name in names:
        monkeypatch.setattr(module, name, Check([made] if name == "mend_replicas" else []))
    monkeypatch.setattr(module, "mend_slots", Check(RuntimeError("no server")))
    recorded: list[list[Repair]] = []
    monkeypatch.setattr(module, "record_reconcile", recorded.append)
    with pytest.raises(ServiceError, match="slots: no server"):
        module.reconcile.fn()
    assert [(r.kind, r.outcome) for r in recorded[0]] == [("check", "failed"), ("slot", "mended")]
