"""Runs a command as a Slurm job and stays with it: ``python -m infra.pools.slurm --partition=mi250 -- COMMAND``.

Prefect's process worker knows one process: the one that it starts, signals at Cancel, and reads the exit code of. This
is that process. Owns that the job's end is its end and the other way round, whether the job runs or waits in the queue.
Knows nothing of what the job does. Standard library only: it runs on a login node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

GRACE_S = 20.0
"""For the job to end by itself after a signal; Prefect's worker sends SIGKILL after 30 s, which nobody can pass on."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# One process on one node, which starts its own ranks; when it fails the whole step ends.
_FIXED = ("--nodes=1", "--ntasks=1", "--kill-on-bad-exit=1", "--export=ALL")


def job_name(flow_run: str | None, pid: int) -> str:
    """What the job is found by; a flow run has one at a time."""
    return f"tide-{flow_run or pid}"


def parse(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options of srun, command). Options without a value, which a template leaves where a variable is unset, go.

    Raises:
        SystemExit: there is no command.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:at], list(arguments[at + 1 :])
    if not command:
        raise SystemExit("usage: python -m infra.pools.slurm [srun options] -- COMMAND ...")
    return [option for option in options if option and not option.endswith("=")], command


class Job:
    """One ``srun`` and the Slurm job behind it.

    Args:
        name: of the job.
        options: further options of srun.
        command: what runs on the node.
    """

    def __init__(self, name: str, options: Sequence[str], command: Sequence[str]) -> None:
        self.name = name
        self._stopped = 0
        self._deadline = 0.0
        self._srun = subprocess.Popen(["srun", f"--job-name={name}", *_FIXED, *options, *command])

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        """Pass a signal on: srun hands it to the job, or withdraws it from the queue."""
        self._stopped = self._stopped or number
        self._deadline = self._deadline or time.monotonic() + GRACE_S
        if self._srun.poll() is None:
            self._srun.send_signal(number)

    def wait(self) -> int:
        """Wait for the end; returns the job's exit code, or 128 + signal when it was stopped.

        A stopped job is cancelled by its name as well: srun may have died before it could pass the signal on.
        """
        while self._srun.poll() is None:
            if self._stopped and time.monotonic() > self._deadline:
                self._srun.kill()
            time.sleep(0.1)
        if not self._stopped:
            # srun killed from outside leaves its job running; one that ended by itself has none to cancel.
            code = self._srun.returncode
            return self._cancel(128 - code) if code < 0 else code
        return self._cancel(128 + self._stopped)

    def _cancel(self, code: int) -> int:
        subprocess.run(["scancel", "--quiet", f"--name={self.name}", "--me"], check=False)
        return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command as a job; the exit code is the job's."""
    options, command = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        job = Job(job_name(os.environ.get("PREFECT__FLOW_RUN_ID"), os.getpid()), options, command)
    except FileNotFoundError:
        raise SystemExit("srun is not on PATH: start this pool's worker where Slurm's commands are") from None
    for number in _FORWARDED:
        signal.signal(number, job.stop)
    return job.wait()


if __name__ == "__main__":
    raise SystemExit(main())
