"""Harvesters as processes of their own that can be killed by their id, forked from one that has imported everything.

Importing takes seconds, a harvest of a small spool one: so a kill falls inside the harvest, not inside an import.
"""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.dataset  # noqa: F401  # what the first read of a table would import

from infra.lakefs.server import Credentials
from tests.support.spooled import harvester_of
from tide.errors import TideError
from tide.store.lakefs import LakefsStore

REFUSED = 3
"""Exit code of a harvest that ended with an error of ours; its files are still in the spool."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Job:
    """One replica's harvest."""

    endpoint: str
    keys: Credentials
    repository: str
    replica: str
    spool: Path
    now: float
    log: Path

    def store(self) -> LakefsStore:
        """A client of its own."""
        return LakefsStore(self.endpoint, self.keys.access_key, self.keys.secret_key)


@dataclass(frozen=True)
class Harvest:
    """A harvest that runs; ``process.exitcode`` will be 0, REFUSED, or minus the signal that ended it."""

    process: BaseProcess
    news: Connection
    """Says when the process has started up and begins, and when it has done its work: a kill counts in between."""

    def hears(self, timeout_s: float) -> bool:
        """Wait for the next news; False when the process ended without."""
        try:
            return self.news.poll(timeout_s) and bool(self.news.recv())
        except EOFError:
            return False


def start(job: Job) -> Harvest:
    """Begin a harvest."""
    news, told = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_harvest, args=(job, told), daemon=True)
    process.start()
    told.close()
    return Harvest(process, news)


def _harvest(job: Job, tells: Connection) -> None:
    harvester = harvester_of(job.store(), job.spool, job.repository, job.replica)
    tells.send("begins")
    try:
        harvester.run(job.now)
        tells.send("has done")
    except TideError:
        with job.log.open("a") as log:
            traceback.print_exc(file=log)
        raise SystemExit(REFUSED) from None
