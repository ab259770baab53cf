"""Events: emitted inside of a run, never outside, and never the reason that a stage fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks import events as module
from tide.watching import events


class Context:
    """Stands in for a run's context."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def get(self) -> object | None:
        return object() if self.inside else None


def emitting(monkeypatch: pytest.MonkeyPatch, *, inside: bool, fails: bool = False) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    def emit(name: str, **fields: Any) -> None:
        if fails:
            raise OSError("no server")
        sent.append({"event": name, **fields})

    monkeypatch.setattr(module, "emit_event", emit)
    monkeypatch.setattr(module, "FlowRunContext", Context(inside))
    monkeypatch.setattr(module, "TaskRunContext", Context(False))
    return sent


def test_what_happened_is_told_with_whom_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = emitting(monkeypatch, inside=True)
    module.announce(events.DRAFT_PROMOTED, events.of_draft("a" * 64), generation="3")
    resource = {"prefect.resource.id": f"tide.draft.{'a' * 64}", "tide.source": "tide"}
    assert sent == [{"event": "tide.draft.promoted", "resource": resource, "payload": {"generation": "3"}}]


def test_outside_of_a_run_nothing_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = emitting(monkeypatch, inside=False)
    module.announce(events.DRIFT_DETECTED, events.of_service("smollm2"))
    assert sent == []


def test_an_event_that_cannot_be_emitted_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    emitting(monkeypatch, inside=True, fails=True)
    warned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "get_run_logger", lambda: SimpleNamespace(warning=lambda *args: warned.append(args)))
    module.announce(events.DRIFT_DETECTED, events.of_service("smollm2"))
    assert "tide.drift.detected" in warned[0]


def test_the_four_events_have_the_names_that_others_listen_to() -> None:
    assert events.EVENTS == (
        "tide.drift.detected",
        "tide.draft.trained",
        "tide.draft.promoted",
        "tide.draft.rolled_back",
    )
