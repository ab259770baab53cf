"""A command as a Slurm job, against stand-ins for srun and scancel: its end is the job's, and the other way round."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.pools import slurm

REPOSITORY = Path(__file__).parents[2]
# Takes srun's options off, remembers them, and becomes the command, as the job it stands for.
SRUN = """#!/bin/sh
echo "$@" > "$STAND_INS/srun"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCANCEL = '#!/bin/sh\necho "$@" > "$STAND_INS/scancel"\n'


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, script in (("srun", SRUN), ("scancel", SCANCEL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_INS", str(tmp_path))
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "8d1f")
    return tmp_path


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-m", "infra.pools.slurm", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def job(stand_ins: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that has begun, and would run for long."""
    with start("--partition=p", "--", "sh", "-c", "echo started; exec sleep 60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


def test_the_exit_code_is_the_jobs_and_nothing_is_cancelled(stand_ins: Path) -> None:
    with start("--partition=p", "--account=", "--", "sh", "-c", "exit 7") as process:
        assert process.wait(20) == 7
    asked = (stand_ins / "srun").read_text().split()
    assert asked[:2] == ["--job-name=tide-8d1f", "--nodes=1"]
    assert "--partition=p" in asked
    assert "--account=" not in asked, "an unset variable of the template is no option"
    assert not (stand_ins / "scancel").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_and_cancels_it_by_name(
    job: subprocess.Popen[str], stand_ins: Path, number: signal.Signals
) -> None:
    job.send_signal(number)
    assert job.wait(20) == 128 + number
    assert (stand_ins / "scancel").read_text().split() == ["--quiet", "--name=tide-8d1f", "--me"]


def test_a_killed_srun_leaves_no_job_behind(job: subprocess.Popen[str], stand_ins: Path) -> None:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert job.wait(20) == 128 + signal.SIGKILL
    assert (stand_ins / "scancel").exists()


def test_a_job_that_ignores_signals_is_killed_after_a_grace(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "GRACE_S", 0.3)
    job = slurm.Job("tide-x", [], ["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"])
    time.sleep(0.3)
    job.stop(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert (stand_ins / "scancel").exists()


def test_without_a_command_or_without_slurm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="COMMAND"):
        slurm.parse(["--partition=p"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="srun is not on PATH"):
        slurm.main(["--", "true"])


def test_a_job_outside_of_a_flow_run_is_named_by_its_process() -> None:
    assert slurm.job_name(None, 12) == "tide-12"
    assert slurm.job_name("8d1f", 12) == "tide-8d1f"
