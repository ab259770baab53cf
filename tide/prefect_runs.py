"""Runs of Prefect, over its HTTP API: their states, and resuming one that waits for a form.

Owns the addresses and what the answers mean. Knows nothing of what the flows do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tide.errors import ApprovalRefused
from tide.prefect_api import PrefectApi

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Run:
    """A flow run as the server knows it."""

    id: str
    type: str
    """State type: SCHEDULED, RUNNING, PAUSED, COMPLETED ..."""
    state: str
    """Name of the state, for people: Suspended, Resuming, Late ..."""
    message: str = ""

    @property
    def final(self) -> bool:
        """Whether it has ended."""
        return self.type in FINAL


class PrefectRuns:
    """Runs on one Prefect server.

    Args:
        url: of the API, ``http://host:port/api``.
        auth: ``user:password`` as PREFECT_API_AUTH_STRING has it; empty: the server asks for none.
    """

    def __init__(self, url: str, auth: str = "") -> None:
        self._api = PrefectApi(url, auth)

    @classmethod
    def from_environment(cls) -> Self:
        """The server that PREFECT_API_URL names. Raises ConfigError when it does not."""
        api = PrefectApi.from_environment()
        return cls(api.url, api.auth)

    def run(self, id: str) -> Run:
        """One run by its id. Raises NotThere when the server has none such."""
        return _run(self._api.call("GET", f"flow_runs/{id}"))

    def of_flow(self, name: str) -> list[Run]:
        """The newest runs of a flow, whatever started them, newest first."""
        body = {"flows": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 50}
        return [_run(found) for found in self._api.call("POST", "flow_runs/filter", body)]

    def resume(self, id: str, form: Mapping[str, str]) -> None:
        """Hand a form to a suspended run, which goes on.

        Raises:
            ApprovalRefused: the server did not take it; says why. Nothing changed.
        """
        answer = self._api.call("POST", f"flow_runs/{id}/resume", {"run_input": dict(form)})
        if answer["status"] != "ACCEPT":  # 201 or 200 says the same, and less clearly
            why = (answer.get("details") or {}).get("reason") or answer["status"]
            raise ApprovalRefused(f"run {id} did not take the answer: {why}; nothing changed")


def _run(found: Mapping[str, Any]) -> Run:
    state = found.get("state") or {}
    return Run(found["id"], state.get("type") or "SCHEDULED", state.get("name") or "", state.get("message") or "")
