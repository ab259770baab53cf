"""Following a training run: its lines, its clock, and the end of every process of it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tide.domain import TrainingConfig, TrainingProgress
from tide.errors import ConfigError, TrainingCancelled, TrainingDiverged, TrainingError, TrainingStalled
from tide.trainer import process as process_module
from tide.trainer.hardware import Hardware
from tide.trainer.process import GroupProcess, sigterm_cancels
from tide.trainer.progress import Watch, follow, parse_step
from tide.trainer.run_config import THREADS, Plan, command, environment, shares


def watch(total: int = 10, now: float = 0.0, bad_steps: int = 3) -> Watch:
    return Watch(total, now, first_step_s=60.0, step_s=20.0, bad_steps=bad_steps)


def step(number: int, loss: str = "2.5") -> str:
    return f"step {number}: {{'acc_0': 0.5, 'loss': {loss}, 'lr': 0.001}}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (step(7), (7, 2.5)),
        (step(7, "1e-05"), (7, 1e-05)),
        ("step 4: {'eval/loss': 3.0}", (4, None)),
        ("Loading weights: 100%|#####| 15/15", None),
        ("step 4 of 9", None),
        ("", None),
    ],
)
def test_step_lines_are_told_from_the_rest(line: str, found: tuple[int, float | None] | None) -> None:
    assert parse_step(line) == found


def test_the_time_to_go_is_that_of_the_steps_seen_so_far_without_the_start_up() -> None:
    run = watch(total=10)
    first = run.read(step(1), 50.0)
    third = run.read(step(3), 54.0)
    assert first == TrainingProgress(step=1, total_steps=10, loss=2.5, eta_s=None)
    assert third is not None
    assert third.eta_s == pytest.approx(14.0)


@pytest.mark.parametrize("loss", ["nan", "inf", "0.0", "-0.0"])
def test_a_loss_that_teaches_nothing_stops_the_run_after_several_steps(loss: str) -> None:
    run = watch()
    run.read(step(1, loss), 1.0)
    run.read(step(2, loss), 2.0)
    with pytest.raises(TrainingDiverged, match="at step 3"):
        run.read(step(3, loss), 3.0)


def test_a_single_bad_step_is_forgiven() -> None:
    run = watch(bad_steps=2)
    for number, loss in enumerate(["nan", "2.0", "nan", "2.0"], start=1):
        progress = run.read(step(number, loss), float(number))
        assert progress is not None
        assert progress.loss == (None if loss == "nan" else 2.0)


def test_a_run_without_a_first_step_is_stalled() -> None:
    run = watch()
    run.check(60.0)
    with pytest.raises(TrainingStalled, match="no first step"):
        run.check(60.1)


def test_a_run_that_stops_stepping_is_stalled_however_much_it_talks() -> None:
    clock = itertools.count(0.0, 5.0)
    lines = [step(1), *["still loading"] * 3, None, None, None]
    seen: list[TrainingProgress] = []
    with pytest.raises(TrainingStalled, match="after step 1"):
        follow(lines, watch(), lambda: next(clock), seen.append)
    assert [p.step for p in seen] == [1]


def test_a_step_that_every_rank_reports_counts_once() -> None:
    seen: list[TrainingProgress] = []
    follow([step(1), step(1), step(2), step(2)], watch(), lambda: 0.0, seen.append)
    assert [p.step for p in seen] == [1, 2]


def test_following_ends_with_the_output() -> None:
    seen: list[TrainingProgress] = []
    follow([step(1), None, step(2)], watch(), lambda: 0.0, seen.append)
    assert [p.step for p in seen] == [1, 2]


TRAINER = (
    "import os, time; from tide.trainer.binding import end_with_parent; "
    "end_with_parent(); print(os.getpid(), flush=True); time.sleep(300)"
)
FAMILY = "sleep 300 & sleep 300 & echo started; wait"


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], GroupProcess]:
    def start(script: str) -> GroupProcess:
        return GroupProcess(
            ["/bin/sh", "-c", script], mark=uuid.uuid4().hex, env=os.environ, log=tmp_path / "log", cwd=tmp_path
        )

    return start


def members(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_exception_of_any_kind_ends_the_whole_group(
    shell: Callable[[str], GroupProcess], error: type[BaseException]
) -> None:
    process = shell(FAMILY)

    def interrupted() -> None:
        with process:
            assert next(line for line in process.lines() if line) == "started"
            assert len(members(process.pid)) == 3
            raise error

    with pytest.raises(error):
        interrupted()
    assert members(process.pid) == []


def test_a_process_that_ignores_sigterm_is_killed(
    shell: Callable[[str], GroupProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", 0.3)
    with shell("trap '' TERM; echo started; while :; do sleep 0.1; done") as process:
        assert next(line for line in process.lines() if line) == "started"
    assert members(process.pid) == []


def test_children_left_behind_by_a_process_that_ended_well_are_ended_too(
    shell: Callable[[str], GroupProcess],
) -> None:
    with shell("sleep 300 >/dev/null 2>&1 & echo done") as process:
        assert [line for line in process.lines() if line] == ["done"]
        process.check_exit()
    assert members(process.pid) == []


def run_to_its_end(process: GroupProcess) -> None:
    with process:
        for _ in process.lines(0.05):
            pass
        process.check_exit()


def test_sigterm_cancels_a_run_and_ends_its_group(shell: Callable[[str], GroupProcess]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    process = shell(FAMILY)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(TrainingCancelled), sigterm_cancels():
        run_to_its_end(process)
    assert members(process.pid) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_interrupt_the_ending(
    shell: Callable[[str], GroupProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", 1.0)
    process = shell("trap '' TERM; echo started; while :; do sleep 0.05; done")
    assert next(line for line in process.lines() if line) == "started"
    for delay in (0.2, 0.6):
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(TrainingCancelled), sigterm_cancels():
        run_to_its_end(process)
    assert members(process.pid) == []


def test_silence_is_reported_as_time_passing(shell: Callable[[str], GroupProcess]) -> None:
    with shell("sleep 0.5; echo late") as process:
        lines = list(process.lines(0.1))
    assert lines[0] is None
    assert lines[-1] == "late"


def test_a_failure_comes_with_its_exit_code_and_the_end_of_the_output(shell: Callable[[str], GroupProcess]) -> None:
    with pytest.raises(TrainingError, match=r"exit code 3.*\n.*out of luck"):
        run_to_its_end(shell("echo out of luck; exit 3"))


def test_a_kill_from_outside_is_told_from_a_stop_that_was_asked_for(shell: Callable[[str], GroupProcess]) -> None:
    with pytest.raises(TrainingError, match="SIGKILL"):
        run_to_its_end(shell("kill -9 $$"))
    with pytest.raises(TrainingCancelled):
        run_to_its_end(shell("kill -15 $$"))


def test_a_command_that_does_not_exist_is_a_training_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="cannot be started"):
        GroupProcess(["/no/such/python"], mark="m", env={}, log=tmp_path / "log", cwd=tmp_path)


def test_a_trainer_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """SIGKILL of the parent runs no handler: the kernel must end the trainer."""
    starter = ["/bin/sh", "-c", f'TIDE_TRAINER_PARENT=$$ "{sys.executable}" -c "{TRAINER}" & sleep 300']
    with GroupProcess(starter, mark=uuid.uuid4().hex, env=os.environ, log=tmp_path / "log", cwd=Path.cwd()) as parent:
        trainer = psutil.Process(int(next(line for line in parent.lines() if line)))
        os.kill(parent.pid, signal.SIGKILL)
        trainer.wait(timeout=10)


@pytest.mark.parametrize(
    ("samples", "knobs", "plan"),
    [
        (10, {"epochs": 2, "checkpoints": 3}, Plan(4, 4, 2)),
        (10, {"epochs": 9, "checkpoints": 3, "max_steps": 10}, Plan(4, 10, 4)),
        (3, {"epochs": 2, "checkpoints": 1}, Plan(3, 2, 2)),
        (40, {"epochs": 1, "checkpoints": 20}, Plan(4, 10, 1)),
    ],
)
def test_checkpoints_are_spread_evenly_and_the_last_is_the_end(samples: int, knobs: dict[str, int], plan: Plan) -> None:
    assert Plan.of(TrainingConfig(batch_size=4, **knobs), samples) == plan


def test_a_cpu_run_is_offline_on_few_threads_and_joins_no_foreign_rendezvous() -> None:
    env = environment(Hardware("cpu"), {"RANK": "3", "MASTER_ADDR": "elsewhere", THREADS: "2", "PATH": "/bin"})
    assert "RANK" not in env
    assert "MASTER_ADDR" not in env
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["SPECFORGE_DEVICE"] == "cpu"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert environment(Hardware("cpu"), {})["OMP_NUM_THREADS"] == "1"


def test_several_ranks_are_started_by_torchrun_and_one_by_itself() -> None:
    one, eight = command(Hardware("cpu"), Path("c.yaml")), command(Hardware("gpu", 8), Path("c.yaml"))
    assert one == [sys.executable, "-m", "tide.trainer.rank", "train", "-c", "c.yaml"]
    assert eight[:4] == [sys.executable, "-m", "tide.trainer.torchrun", "--standalone"]
    assert eight[eight.index("--nproc-per-node") + 1] == "8"
    assert eight[eight.index("--module") + 1 :] == one[2:]


def test_gpus_get_no_cpu_settings_and_every_rank_its_parent() -> None:
    env = environment(Hardware("gpu", 8), {})
    assert "SPECFORGE_DEVICE" not in env
    assert env["TIDE_TRAINER_PARENT"] == str(os.getpid())
    assert env["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("batch", "at_once", "ranks", "shared"),
    [(16, None, 8, (2, 1)), (16, 1, 8, (1, 2)), (16, 4, 2, (4, 2)), (4, 8, 1, (4, 1)), (4, None, 4, (1, 1))],
)
def test_a_step_has_the_same_samples_however_many_ranks_share_them(
    batch: int, at_once: int | None, ranks: int, shared: tuple[int, int]
) -> None:
    config = TrainingConfig(batch_size=batch, device_batch_size=at_once)
    assert shares(config, ranks) == shared
    assert shared[0] * shared[1] * ranks == batch


@pytest.mark.parametrize(
    ("batch", "at_once", "ranks", "named"),
    [(4, None, 8, "TIDE_TRAIN_RANKS"), (9, None, 2, "batch_size is 9"), (8, 3, 2, "device_batch_size is 3")],
)
def test_a_batch_that_does_not_divide_is_refused_with_what_would(
    batch: int, at_once: int | None, ranks: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        shares(TrainingConfig(batch_size=batch, device_batch_size=at_once), ranks)


@pytest.mark.parametrize(
    ("samples", "ranks", "at_once", "plan"),
    [
        # 15 samples are 8 a rank, one of them twice: 4 batches of 2, of which 2 make a step of 8.
        (15, 2, 2, Plan(2, 4, 2, accumulation=2)),
        # An odd batch at the end of an epoch is accumulated with the first of the next.
        (10, 2, 2, Plan(2, 2, 1, accumulation=2)),
        (3, 2, 2, Plan(2, 1, 1, accumulation=2)),
        (1, 2, None, Plan(1, 2, 1)),
    ],
)
def test_every_rank_makes_the_same_number_of_steps(samples: int, ranks: int, at_once: int | None, plan: Plan) -> None:
    config = TrainingConfig(batch_size=8, device_batch_size=at_once, epochs=2, checkpoints=2)
    assert Plan.of(config, samples, ranks=ranks) == plan
