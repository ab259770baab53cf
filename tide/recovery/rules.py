"""What a process that died leaves behind, when it is taken for dead, and what of it may be mended.

Owns the rules of ``reconcile``, their thresholds, and the record of what one found and did. Pure: views of runs, slots
and processes in, reasons out; clocks are arguments. Knows nothing of Prefect, lakeFS or /proc.

The rule above all others: what may still be alive is left alone. A run is looked at twice, with time for a heartbeat
between; a slot counts as leaked by two readings; a process is ended only when it carries the mark of its own run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from tide.domain import Record, Value

BEAT_S = 60
"""Seconds between two heartbeats of a flow run; Prefect's least is 30."""
BEATS = 3
"""Heartbeats that may be missing before a run is marked crashed: fewer would crash healthy runs on a busy machine."""

FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
AT_WORK = frozenset({"PENDING", "RUNNING", "CANCELLING"})
"""States in which a run holds its slot."""


class Patience(Value):
    """Seconds after which something that does not move is taken for dead."""

    silent_s: float = Field(default=5.0 * BEAT_S, gt=0)
    """Since the last heartbeat of a run that is running, or since it began when there was none. Above Prefect's own
    180 s, so that a worker without our settings is safe."""
    second_look_s: float = Field(default=1.5 * BEAT_S, ge=0)
    """Until a silent run is looked at again, in which a healthy one beats: after an outage of the server every run
    looks silent for a while."""
    pending_s: float = Field(default=900.0, gt=0)
    """Between being handed to a worker and the first line of the flow."""
    ended_s: float = Field(default=120.0, ge=0)
    """Between the end of a run and the end of its processes."""
    scratch_s: float = Field(default=86400.0, ge=0)
    """That the folder of a dead training run is kept, for whoever looks into why it died."""


class RunView(Value):
    """A flow run, as far as the rules look."""

    id: str
    name: str
    flow: str
    deployment: str
    state: str
    """Type of its state: ``RUNNING`` ..."""
    since: float
    """When it came into its state; seconds since the epoch."""
    last_beat: float | None = None
    """Newest heartbeat; None when there was none."""


class SlotView(Value):
    """The concurrency slots of one deployment at one moment."""

    deployment: str
    limit: str
    """Name of the limit."""
    held: int
    runs: frozenset[str]
    """Runs of the deployment that may hold one."""


class Repair(Value):
    """One thing that was found, and what became of it."""

    kind: Literal["run", "slot", "process", "scratch", "branch", "replica", "approval", "check"]
    subject: str
    found: str
    outcome: Literal["mended", "left", "failed"]


class ReconcileReport(Record):
    """What one reconcile found and did."""

    schema_version: Literal[1] = 1
    at: float
    run: str
    repairs: tuple[Repair, ...]

    @property
    def mended(self) -> int:
        """How many things were put right."""
        return sum(r.outcome == "mended" for r in self.repairs)


def stuck(run: RunView, now: float, patience: Patience) -> str | None:
    """Why a run that holds a slot looks dead; None when it does not."""
    if run.state == "PENDING":
        waited = now - run.since
        return f"pending for {waited:.0f} s: its worker died before it began" if waited > patience.pending_s else None
    if run.state not in AT_WORK:
        return None
    heard = max(run.since, run.last_beat or 0.0)
    silent = now - heard
    if silent <= patience.silent_s:
        return None
    return f"{run.state.lower()} without a heartbeat for {silent:.0f} s: its process has died"


def still_stuck(first: RunView, again: RunView | None, now: float, patience: Patience) -> str | None:
    """The same by a second look: a run that moved or beat in between lives.

    Args:
        again: the run as it is now; None when it is over.
    """
    if again is None or (again.state, again.last_beat, again.since) != (first.state, first.last_beat, first.since):
        return None
    return stuck(again, now, patience)


def leaked(first: SlotView, again: SlotView) -> int:
    """Slots that nobody holds, by two readings between which no run of the deployment came or went."""
    if first.runs != again.runs:
        return 0
    return max(0, min(first.held, again.held) - len(again.runs))


def orphaned(flow_alive: bool, run: RunView | None, now: float, patience: Patience) -> str | None:
    """Why a training group has no owner any more; None when it has, or may have.

    Args:
        flow_alive: whether the process that started it runs.
        run: its flow run; None when this Prefect server does not know it.
    """
    if not flow_alive:
        return "the flow that started it is dead"
    if run is None or run.state not in FINAL or now - run.since <= patience.ended_s:
        return None
    return f"its flow run {run.name} is {run.state.lower()} for {now - run.since:.0f} s"


def discarded(flow_alive: bool, members: int, age_s: float, patience: Patience) -> bool:
    """True when nobody needs the folder of a training run any more."""
    return not flow_alive and members == 0 and age_s > patience.scratch_s


def busy_flows(runs: Iterable[RunView]) -> frozenset[str]:
    """Names of the flows that are at work."""
    return frozenset(run.flow for run in runs if run.state in AT_WORK)


def to_markdown(report: ReconcileReport) -> str:
    """The report as a table to read."""
    if not report.repairs:
        return "## All as it should be\n\nNothing half-made, nothing orphaned, every replica as `serving.json` says."
    rows = [f"| {r.kind} | `{r.subject}` | {r.found} | {r.outcome} |" for r in report.repairs]
    title = f"## {report.mended} mended, {len(report.repairs) - report.mended} not"
    return "\n".join([title, "", "| what | which | found | outcome |", "|---|---|---|---|", *rows])
