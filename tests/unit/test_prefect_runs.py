"""Prefect's API as the commands speak to it, and the demo that follows a run which another one started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import ports
from tests.fakes.memory_store import MemoryStore
from tests.support.prefect_stub import PrefectStub, prefect_stub
from tide.config import Settings
from tide.demo import cycles
from tide.demo.cycles import Cycles
from tide.errors import ApprovalRefused, ConfigError, ServiceError
from tide.prefect_runs import PrefectRuns


@pytest.fixture
def stub() -> Iterator[PrefectStub]:
    with prefect_stub() as running:
        running.runs["one"] = "PAUSED"
        yield running


def test_a_form_is_handed_over_and_a_refusal_is_read_from_the_status_not_from_the_code(stub: PrefectStub) -> None:
    runs = PrefectRuns(stub.url)
    runs.resume("one", {"decision": "approve"})
    assert stub.forms == [("one", {"decision": "approve"})]
    stub.runs["one"] = "COMPLETED"
    with pytest.raises(ApprovalRefused, match="not paused"):
        runs.resume("one", {})


def test_a_locked_database_is_tried_again(stub: PrefectStub) -> None:
    stub.locked = 2
    assert PrefectRuns(stub.url).run("one").type == "PAUSED"


def test_the_password_is_sent_and_a_missing_one_is_asked_for(
    stub: PrefectStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.auth = "admin:geheim"
    monkeypatch.setenv("PREFECT_API_URL", stub.url)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:geheim")
    assert not PrefectRuns.from_environment().run("one").final
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    with pytest.raises(ConfigError, match="PREFECT_API_AUTH_STRING"):
        PrefectRuns.from_environment().run("one")


def test_a_server_that_is_not_there_or_not_named_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError, match="tide status"):
        PrefectRuns(f"http://127.0.0.1:{ports.free_port()}/api").run("one")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(ConfigError, match="tide env"):
        PrefectRuns.from_environment()


# The demo


def follow(stub: PrefectStub, folder: Path, monkeypatch: pytest.MonkeyPatch, *states: str) -> int:
    """Let the promotion go through these states, one a second, and follow it; the seconds it was waited for."""
    waited = iter(range(99))
    later = iter(states[1:])

    def sleep(_seconds: float) -> None:
        next(waited)
        stub.runs["one"] = next(later)

    stub.runs["one"] = states[0]
    monkeypatch.setattr(cycles.time, "sleep", sleep)
    config = Settings(service="svc", home=folder, _env_file=None)  # type: ignore[call-arg]
    Cycles({"PREFECT_API_URL": stub.url}, folder, config, MemoryStore()).follow("promote", lambda _: None)
    return next(waited)


def test_the_demo_waits_for_the_promotion_that_a_cycle_started(
    stub: PrefectStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow(stub, tmp_path, monkeypatch, "SCHEDULED", "PENDING", "RUNNING", "COMPLETED") == 3
    assert follow(stub, tmp_path, monkeypatch, "COMPLETED") == 0


def test_the_demo_does_not_wait_where_none_was_started(
    stub: PrefectStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.runs.clear()
    config = Settings(service="svc", home=tmp_path, _env_file=None)  # type: ignore[call-arg]
    Cycles({"PREFECT_API_URL": stub.url}, tmp_path, config, MemoryStore()).follow("promote", lambda _: None)


@pytest.mark.parametrize(("states", "said"), [(("RUNNING", "FAILED"), "Failed: why"), (("PAUSED",), "asks nobody")])
def test_a_promotion_that_fails_or_waits_for_a_person_ends_the_demo_with_the_reason(
    stub: PrefectStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ServiceError, match=said):
        follow(stub, tmp_path, monkeypatch, *states)
