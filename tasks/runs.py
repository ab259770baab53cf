"""What the Prefect server knows of our runs, as `tide.recovery.rules` wants it, and how a dead one is ended.

Owns the calls to Prefect's API. Our runs are those with the tag ``tide``, which every deployment of prefect.yaml has:
a server that others use too is left alone. Decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from tide.recovery.rules import AT_WORK, FINAL, RunView, SlotView

TAG = "tide"
_PAGE = 200
_ENDED = 20
"""Runs of a deployment that ended last, whose leases are looked at when a slot is missing."""


@contextmanager
def server() -> Iterator[RunServer]:
    """The Prefect server of this process's settings."""
    with get_client(sync_client=True) as client:
        yield RunServer(client)


def current_run() -> str | None:
    """Id of the flow run that we are in; None outside of one."""
    if context := FlowRunContext.get():
        return str(context.flow_run.id) if context.flow_run else None
    task = TaskRunContext.get()
    return str(task.task_run.flow_run_id) if task and task.task_run.flow_run_id else None


def attempt_key(name: str) -> str:
    """Idempotency key of the next run of this name: the one on its way, or a new one when all before have ended."""
    with get_client(sync_client=True) as client:
        for attempt in itertools.count():
            key = f"{name}/{attempt}"
            wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
            runs = client.read_flow_runs(flow_run_filter=wanted, limit=1)
            if not runs or runs[0].state is None or not runs[0].state.is_final():
                return key
    raise AssertionError


class RunServer:
    """One connection to a Prefect server."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client
        self._names: dict[UUID, str] = {}

    def at_work(self) -> list[RunView]:
        """Our runs that hold slots, with their newest heartbeats; the one that asks left out."""
        types = [StateType(name) for name in sorted(AT_WORK)]
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[TAG]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types))
        )
        ours = current_run()
        runs = self._client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE, sort=FlowRunSort.START_TIME_ASC)
        return [self._view(run) for run in runs if str(run.id) != ours]

    def run(self, id: str) -> RunView | None:
        """One run; None when the server does not know it."""
        try:
            return self._view(self._client.read_flow_run(UUID(id)))
        except ObjectNotFound:
            return None

    def crash(self, run: RunView, why: str) -> bool:
        """Mark a run crashed, which gives its slot back. False when it has ended by itself meanwhile."""
        if (now := self.run(run.id)) is None or now.state in FINAL:
            return False
        self._client.set_flow_run_state(UUID(run.id), Crashed(message=f"reconcile: {why}"))
        found = self.run(run.id)
        return found is not None and found.state == "CRASHED"

    def slots(self) -> list[SlotView]:
        """Slots of every deployment of ours that has a limit, and the runs that may hold them, ours among them."""
        return [view for deployment in self._deployments() if (view := self._slots(deployment))]

    def free(self, slot: SlotView, count: int) -> None:
        """Give back slots that nobody holds: by the leases of runs that have ended, then by number.

        A lease that stays behind would be counted off a second time when it expires.
        """
        [deployment] = [d for d in self._deployments() if self._name(d) == slot.deployment]
        for lease in self._old_leases(deployment):
            self._client.release_concurrency_slots_with_lease(lease)
        again = self._slots(deployment)
        if again is not None and (left := min(count, again.held - len(again.runs))) > 0:
            self._client.release_concurrency_slots([slot.limit], slots=left, occupancy_seconds=1.0)

    def _deployments(self) -> list[DeploymentResponse]:
        wanted = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG]))
        return self._client.read_deployments(deployment_filter=wanted, limit=_PAGE)

    def _slots(self, deployment: DeploymentResponse) -> SlotView | None:
        limit = deployment.global_concurrency_limit
        if limit is None:
            return None
        types = [StateType(name) for name in sorted(AT_WORK)]
        runs = self._runs_of(deployment, types)
        held = self._client.read_global_concurrency_limit_by_name(limit.name).active_slots
        return SlotView(
            deployment=self._name(deployment),
            limit=limit.name,
            held=held,
            runs=frozenset(str(run.id) for run in runs),
        )

    def _runs_of(self, deployment: DeploymentResponse, types: list[StateType]) -> list[FlowRun]:
        wanted = FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)),
        )
        return self._client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE, sort=FlowRunSort.START_TIME_DESC)

    def _old_leases(self, deployment: DeploymentResponse) -> set[UUID]:
        """Leases of the runs of a deployment that ended last."""
        ended = self._runs_of(deployment, [StateType(name) for name in sorted(FINAL)])[:_ENDED]
        states = [state for run in ended for state in self._client.read_flow_run_states(run.id)]
        found = (state.state_details.deployment_concurrency_lease_id for state in states)
        return {lease for lease in found if lease is not None}

    def _view(self, run: FlowRun) -> RunView:
        assert run.state is not None
        return RunView(
            id=str(run.id),
            name=run.name,
            flow=self._flow(run.flow_id),
            deployment=str(run.deployment_id or ""),
            state=run.state.type.value,
            since=run.state.timestamp.timestamp(),
            last_beat=self._last_beat(run.id),
        )

    def _last_beat(self, run: UUID) -> float | None:
        now = datetime.now(UTC)
        wanted = EventFilter(
            event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{run}"]),
            occurred=EventOccurredFilter(since=now - timedelta(days=7), until=now + timedelta(hours=1)),
        )
        page = self._client.read_events(wanted, limit=1)
        return max((event.occurred.timestamp() for event in page.events), default=None)

    def _flow(self, id: UUID) -> str:
        if id not in self._names:
            self._names[id] = self._client.read_flow(id).name
        return self._names[id]

    def _name(self, deployment: DeploymentResponse) -> str:
        return f"{self._flow(deployment.flow_id)}/{deployment.name}"
