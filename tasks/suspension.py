"""Suspending the run that waits for a person until a form comes, and letting other runs go on.

Owns the form, and what Prefect can suspend. Knows nothing of policies, verdicts or the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from prefect import get_run_logger, suspend_flow_run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.settings import get_current_settings
from pydantic import Field

from tide.approvals.answers import Form, is_loopback
from tide.errors import ConfigError


class ApprovalForm(RunInput):
    """Texts that may be empty: what is wrong is said by the flow, which asks again; Prefect would fail the run."""

    decision: str = Field(default="", title="Decision", description="approve or refuse")
    reviewer: str = Field(default="", title="Reviewer", description="your name, as policy lists it")
    reason: str = Field(default="", title="Reason", description="why")
    signed: str = Field(default="", title="Signature", description="made by `tide approve`; leave empty")


def this_run() -> str:
    """Id of the run that this is part of; empty outside of one."""
    return str(flow_run.id or "")


def require_suspendable() -> None:
    """Raises ConfigError when this run cannot wait for a person."""
    if not deployment.id or flow_run.parent_flow_run_id:
        raise ConfigError(
            "policy wants a person to approve, and only a run of a deployment without a parent can wait for one: "
            "start it by `prefect deployment run promote/promote`, or set approval.mode to auto"
        )


def form_for(key: str, description: str) -> Form:
    """Suspend until a form comes; the run starts from the top then, comes here again, and is given the form.

    Prefect is given no timeout: it fails a run that is resumed after one.

    Args:
        key: a key that fired before gives its form, so each form has its own.
        description: markdown, shown above the form.
    """
    described = ApprovalForm.with_initial_data(description=description)
    form = suspend_flow_run(wait_for_input=described, key=key)
    return Form(form.decision, form.reviewer, form.reason, form.signed)


def resume_suspended(runs: Sequence[str]) -> None:
    """Let those of the runs that are suspended go on, with an empty form; the others go on, or have ended, already."""
    if not runs:
        return
    wanted = FlowRunFilter(
        id=FlowRunFilterId(any_=[UUID(run) for run in runs]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])),
    )
    with get_client(sync_client=True) as client:
        for found in client.read_flow_runs(flow_run_filter=wanted):
            answer = client.resume_flow_run(found.id, run_input={})
            get_run_logger().info("run %s: resume: %s", found.id, answer.status.value)


def state_of(run: str) -> State | None:
    """The state of a run; None when this server does not know it."""
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(UUID(run)).state
    except ObjectNotFound:
        return None


def api_on_loopback() -> bool:
    """Whether Prefect's API, by which forms come, can be reached from this machine alone."""
    return is_loopback(get_current_settings().api.url or "")
