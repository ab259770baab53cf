"""Lineage as OpenLineage events: what is sent for what is committed, and that a receiver can never be in the way."""

from __future__ import annotations

import json
import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.memory_store import MemoryStore
from tests.support.signed import put_verdict, verdict_on
from tests.support.spooled import START, TARGET, WINDOW_S, full_spool, harvester_of
from tests.unit.test_history import DRAFTS, STATES, A, B, candidate, harvest
from tide import wiring
from tide.config import Settings
from tide.domain import LineageRecord, Verdict
from tide.errors import ConfigError
from tide.lineage.openlineage import PAUSE_S, OpenLineage
from tide.states.harvest import Harvester
from tide.store.base import Commit, Store
from tide.store.lakefs import LakefsStore
from tide.store.telling import telling

NAMESPACE = "lakefs://store.example:8000"


def openlineage(url: str, **options: Any) -> OpenLineage:
    return OpenLineage(url, store="http://store.example:8000", service="svc", states_repository="svc-states", **options)


class Told:
    """A store in memory whose lineage goes to a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "events.jsonl"
        self.openlineage = openlineage(self.file.as_uri())
        self.store = telling(MemoryStore(), self.openlineage.committed)
        for repository in (STATES, DRAFTS):
            self.store.create_repository(repository)

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.openlineage.lost == 0
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def promoted(store: Store, digest: str, previous: str, kind: str = "promotion") -> Commit:
    """``serving.json`` on a branch, merged with the same record, as the rollout does it."""
    record = LineageRecord.model_validate(
        {
            "kind": kind,
            "subject": digest,
            "parents": {"draft": digest, "previous": previous, "verdict": "5" * 63 + digest[1]},
            "facts": {"generation": "2", "replicas": "r0"},
        }
    ).to_metadata()
    store.create_branch(DRAFTS, f"serving-{kind}", "main")
    store.put(DRAFTS, f"serving-{kind}", "serving.json", f"{kind} {digest}".encode())
    store.commit(DRAFTS, f"serving-{kind}", "serve", record)
    return store.merge(DRAFTS, f"serving-{kind}", "main", kind, record)


def judged(store: Store, verdict: Verdict) -> str:
    """A verdict on a candidate's branch; returns its digest."""
    put_verdict(store, DRAFTS, f"candidate-{verdict.candidate[:6]}", verdict)
    return verdict.digest()


def names(event: dict[str, Any], side: str) -> list[str]:
    assert {d["namespace"] for d in event[side]} <= {NAMESPACE}
    return [d["name"] for d in event[side]]


def test_each_record_is_one_event_with_what_it_was_made_from_and_what_it_made(told: Told) -> None:
    store = told.store  # type: ignore[assignment]
    empty = store.head(STATES, "main").id
    states = harvest(store, "20261130T0900Z")  # type: ignore[arg-type]
    candidate(store, B, states, A)  # type: ignore[arg-type]
    verdict = judged(store, verdict_on(B, A, states=states))
    served = promoted(store, B, A).id
    back = promoted(store, A, B, "rollback").id
    assert [(e["job"]["name"], names(e, "inputs"), names(e, "outputs")) for e in told.events] == [
        ("harvest", [f"{STATES}@{empty}"], [f"{STATES}@{states}"]),
        ("train", [A, f"{STATES}@{states}"], [B]),
        ("evaluate", [B, A, f"{STATES}@{states}"], [verdict]),
        ("promote", [B, A, "5" * 63 + B[1]], [f"{DRAFTS}@{served}"]),
        ("rollback", [A, B, "5" * 63 + A[1]], [f"{DRAFTS}@{back}"]),
    ]
    assert {e["job"]["namespace"] for e in told.events} == {"tide/svc"}
    assert len({e["run"]["runId"] for e in told.events}) == 5


def test_a_first_draft_has_no_parent_and_an_imported_one_no_states(told: Told) -> None:
    candidate(told.store, A, "f" * 64, None)  # type: ignore[arg-type]
    judged(told.store, verdict_on(A, states="f" * 64))
    record = LineageRecord(kind="candidate", subject=B, parents={"states": "imported"})
    told.store.create_branch(DRAFTS, "candidate-b", "main")
    told.store.put(DRAFTS, "candidate-b", "drafts/b", b"b")
    told.store.commit(DRAFTS, "candidate-b", "imported", record.to_metadata())
    trained, verdict, imported = told.events
    assert names(trained, "inputs") == [f"{STATES}@{'f' * 64}"]
    assert names(verdict, "inputs") == [A, f"{STATES}@{'f' * 64}"]
    assert imported["inputs"] == []


def test_commits_without_a_record_are_nobody_s_business(told: Told) -> None:
    told.store.put(DRAFTS, "main", "file", b"1")
    told.store.commit(DRAFTS, "main", "by hand", {"owner": "ops"})
    assert told.events == []


def check_event(event: dict[str, Any]) -> None:
    """What https://openlineage.io/spec/2-0-2/OpenLineage.json requires of a RunEvent and of every facet."""
    assert event["eventType"] == "COMPLETE"
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert uuid.UUID(event["run"]["runId"])
    assert event["schemaURL"] == "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
    assert urlsplit(event["producer"]).scheme == "pkg"
    parts = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    assert all(part["namespace"] and part["name"] for part in parts[1:])
    for part in parts:
        for name in ("facets", "inputFacets", "outputFacets"):
            for facet in part.get(name, {}).values():
                assert urlsplit(facet["_schemaURL"]).netloc == "openlineage.io"
                assert urlsplit(facet["_producer"]).scheme


def test_events_are_as_the_specification_wants_them_and_say_what_the_record_says(told: Told) -> None:
    states = harvest(told.store, "20261130T0900Z")  # type: ignore[arg-type]
    candidate(told.store, A, states, None)  # type: ignore[arg-type]
    judged(told.store, verdict_on(A, states=states))
    promoted(told.store, A, "none")
    assert len(told.events) == 4
    for event in told.events:
        check_event(event)
    trained = told.events[1]
    assert trained["inputs"][0]["facets"]["version"]["datasetVersion"] == states
    assert trained["run"]["facets"]["processing_engine"]["name"] == "TIDE"
    tags = {t["key"]: t["value"] for t in trained["run"]["facets"]["tags"]["tags"]}
    assert (tags["kind"], tags["steps"], tags["policy"], tags["cause"]) == ("candidate", "220", "f" * 64, "drift")


@given(facts=st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=9), max_size=5), at=st.floats(0, 4e9))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_record_and_time_makes_a_valid_event(facts: dict[str, str], at: float) -> None:
    sender = openlineage("http://127.0.0.1:1")
    record = LineageRecord(kind="promotion", subject=A, parents={"draft": A}, facts=facts)
    commit = Commit(id="c", message="", metadata=record.to_metadata(), parents=(), created_at=at)
    from openlineage.client.serde import Serde

    event = json.loads(Serde.to_json(sender._event(DRAFTS, commit, record)))
    check_event(event)
    assert {t["key"] for t in event["run"]["facets"]["tags"]["tags"]} >= {k for k, v in facts.items() if v}


class Receiver(HTTPServer):
    """Keeps what was posted to it; answers ``status``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, str | None, dict[str, Any]]] = []
        self.status = 201
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def harvester(store: Store, spool: Path) -> Harvester:
    return harvester_of(store, spool, STATES)


def test_a_harvest_is_received_once_a_window(receiver: Receiver, tmp_path: Path) -> None:
    full_spool(tmp_path)
    sender = openlineage(receiver.url, api_key="a key")
    store = telling(MemoryStore(), sender.committed)
    result = harvester(store, tmp_path).run(START + 2 * WINDOW_S)
    assert harvester(store, tmp_path).run(START + 2 * WINDOW_S).windows == ()
    assert {(path, key) for path, key, _ in receiver.got} == {("/api/v1/lineage", "Bearer a key")}
    first, second = (event for _, _, event in receiver.got)
    check_event(first)
    assert names(second, "outputs") == [f"{STATES}@{result.commit}"]
    assert names(second, "inputs") == names(first, "outputs"), "windows follow one another"
    statistics = first["outputs"][0]["outputFacets"]["outputStatistics"]
    assert (statistics["fileCount"], statistics["rowCount"]) == (2, 72)
    tags = {t["key"]: t["value"] for t in first["run"]["facets"]["tags"]["tags"]}
    assert (tags["replica"], tags["target_contract"]) == ("r0", TARGET.digest())
    assert sender.lost == 0


@pytest.mark.parametrize("kind", ["refuses", "is down", "cannot be written"])
def test_a_receiver_that_fails_is_warned_of_once_and_stops_nothing(
    kind: str, receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 403
    urls = {
        "refuses": receiver.url,
        "is down": "http://127.0.0.1:1",
        "cannot be written": (tmp_path / "missing" / "events").as_uri(),
    }
    now = [0.0]
    sender = openlineage(urls[kind], clock=lambda: now[0])
    store = telling(MemoryStore(), sender.committed)
    store.create_repository(STATES)
    with caplog.at_level(logging.WARNING):
        for minute in range(3):
            now[0] += PAUSE_S
            harvest(store, f"20261130T090{minute}Z")  # type: ignore[arg-type]
    assert sender.lost == 3
    (warning,) = [r for r in caplog.records if r.name == "tide.lineage.openlineage"]
    assert urls[kind] in warning.getMessage()
    assert sum(LineageRecord.from_metadata(c.metadata) is not None for c in store.log(STATES, "main")) == 6


def test_after_a_failure_nothing_is_tried_for_a_while_and_then_it_goes_on(receiver: Receiver) -> None:
    now = [0.0]
    sender = openlineage(receiver.url, clock=lambda: now[0])
    store = telling(MemoryStore(), sender.committed)
    store.create_repository(STATES)
    receiver.status = 400
    for window in "ab":
        harvest(store, window)  # type: ignore[arg-type]
    assert (len(receiver.got), sender.lost) == (1, 2)
    receiver.status, now[0] = 201, PAUSE_S
    harvest(store, "c")  # type: ignore[arg-type]
    assert (len(receiver.got), sender.lost) == (2, 2)


@pytest.mark.parametrize("url", ["store.example:5000", "ftp://store.example", "http://", "file://", "file:///"])
def test_an_address_of_no_known_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"TIDE_OPENLINEAGE_URL.*expected http"):
        openlineage(url)


def test_without_the_extra_the_setting_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    with pytest.raises(ConfigError, match=r"pip install 'tide\[openlineage\]'"):
        openlineage("http://127.0.0.1:1")


def test_it_is_off_unless_a_setting_says_where_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_OPENLINEAGE_URL", raising=False)
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    plain = Settings(lakefs_access_key="k", lakefs_secret_key="s")
    assert isinstance(wiring.store(plain), LakefsStore)
    monkeypatch.undo()
    told = plain.model_copy(update={"openlineage_url": (tmp_path / "events").as_uri()})
    assert not isinstance(wiring.store(told), LakefsStore)
    assert wiring.openlineage(told) is wiring.openlineage(told), "one a process"
