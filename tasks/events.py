"""Events: what happened, told to Prefect for automations and for whoever looks at the feed. Never fails a stage."""

from __future__ import annotations

from prefect import get_run_logger
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import emit_event

SOURCE = "tide"


def announce(name: str, resource: str, **payload: str) -> None:
    """Emit an event of `tide.watching.events`. Outside of a run nobody listens, and nothing is emitted.

    Args:
        resource: what it is about: `events.of_service` or `events.of_draft`.
    """
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return
    try:
        emit_event(name, resource={"prefect.resource.id": resource, "tide.source": SOURCE}, payload=dict(payload))
    except Exception as error:  # noqa: BLE001  # whatever it is, the stage has done its work
        get_run_logger().warning("event %s was not emitted: %s", name, error)
