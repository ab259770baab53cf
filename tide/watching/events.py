"""Names of the events by which TIDE tells others what happened; automations listen to them.

Owns the names and whom they are about. Emits nothing: tasks/events.py does.
"""

from __future__ import annotations

DRIFT_DETECTED = "tide.drift.detected"
"""The drift gate asks for a draft. About the service; payload: cause, reasons."""
DRAFT_TRAINED = "tide.draft.trained"
"""A candidate was published. About the draft; payload: branch, states commit."""
DRAFT_PROMOTED = "tide.draft.promoted"
"""A draft serves on every replica. About the draft; payload: generation, previous."""
DRAFT_ROLLED_BACK = "tide.draft.rolled_back"
"""An earlier draft serves again. About the draft that serves; payload: generation, previous."""

EVENTS = (DRIFT_DETECTED, DRAFT_TRAINED, DRAFT_PROMOTED, DRAFT_ROLLED_BACK)

ALERT = "tide.alert."
"""How the resource begins that a monitor outside of the cycle names when it emits ``tide.drift.detected``: only these
start a cycle, for the cycle emits the same event about ``tide.service.*`` itself."""


def of_service(service: str) -> str:
    """Resource of a service."""
    return f"tide.service.{service}"


def of_draft(digest: str) -> str:
    """Resource of a draft."""
    return f"tide.draft.{digest}"
