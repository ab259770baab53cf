"""One screen that shows what can be read and names what cannot, in words that nobody else can choose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typing_extensions import override

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.approving import REQUEST
from tests.support.signed import verdict_on
from tests.unit.test_ledger_tail import drift
from tests.unit.test_rollout import REPOSITORY, A, B, promote, store_with
from tide import cli
from tide.approvals import rules as approval_rules
from tide.approvals import steps as approvals
from tide.domain import DriftReport
from tide.engine import sglang_metrics
from tide.engine.live import LiveFigures
from tide.errors import ConfigError, EngineError, EngineUnavailable, StoreUnavailable
from tide.lineage import ledger
from tide.watching import status_text
from tide.watching.observed import Backlog, ReplicaView, ServingView, backlog
from tide.watching.status import Part, Sources, Status, gather
from tide.watching.waiting import waiting

NOW = 1_800_000_000.0
FIELDS = {"service", "at", "serving", "replicas", "acceptance", "last", "waiting", "spool", "parts", "errors"}


class DownStore(MemoryStore):
    """Nothing of it answers."""

    @override
    def _repository(self, repository: str) -> object:  # type: ignore[override]
        raise StoreUnavailable(f"read: repository {repository}: connection refused")


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    for folder in ("train", "held_out", "requests", "quarantine"):
        (tmp_path / "spool" / folder).mkdir(parents=True)
    return tmp_path / "spool"


def sources(
    store: MemoryStore, engines: list[FakeEngine], spool: Path, live: dict[str, Callable[[], LiveFigures]] | None = None
) -> Sources:
    return Sources(
        service="svc",
        store=store,
        repository=REPOSITORY,
        replicas=engines,
        live=live or {},
        spool=spool,
        window_s=lambda: 300,
    )


def screen(found: Status) -> str:
    return status_text.plain(found)


def served(tmp_path: Path, *engines: FakeEngine) -> MemoryStore:
    store = store_with(A, B)
    promote(store, A, list(engines), tmp_path / "drafts", 0)
    return store


def test_a_service_that_is_well_says_what_serves_since_when_and_why(tmp_path: Path, spool: Path) -> None:
    engine = FakeEngine("r0")
    store = served(tmp_path, engine)
    verdict = verdict_on(A)
    ledger.append(store, REPOSITORY, "verdict", verdict, at=NOW - 120)
    ledger.append(
        store, REPOSITORY, "drift", drift(rate=0.41, expected_rate=0.45, cusum=3.0, cusum_threshold=20.0), at=NOW
    )
    live = {
        "r0": lambda: LiveFigures(accept_length=1.66, running=2, capture={"rows_total": 10, "dropped_rows_total": 1})
    }
    found = gather(sources(store, [engine], spool, live), [Part(name="lakefs", state="running", pid=7)], NOW)
    text = screen(found)
    assert found.errors == {}
    assert not found.blind
    assert f"generation 1, draft {A[:12]}" in text
    assert f"ok           serves {A[:12]}; 2 running; 10 rows captured, 1 dropped" in text
    assert "rate 0.410 now, 0.450 baseline (drift report of 2027-01-15 08:00 UTC); sum of losses 3.0 of 20.0 sd" in text
    assert "length 1.66 now, 1.72 by its verdict (SGLang's /metrics, last interval)" in text
    assert "verdict   promote: Promoted: it generates 1.720 tokens a verify step against 1.380" in text
    assert "lakefs           running  7" in text
    assert [h.kind for h in found.last] == ["drift", "verdict", "promotion"], "newest first"
    assert f"generation 1: draft {A[:12]} on r0 in" in text


def test_a_replica_that_serves_another_draft_is_marked_with_the_way_out(tmp_path: Path, spool: Path) -> None:
    engine, other = FakeEngine("r0"), FakeEngine("r1")
    store = served(tmp_path, engine, other)
    other.swap_draft(B)
    found = gather(sources(store, [engine, other], spool), [], NOW)
    assert f"MISMATCH     serves {B[:12]}, serving.json says {A[:12]}  -> tide reconcile" in screen(found)
    assert [r.matches(found.serving) for r in found.replicas] == [True, False]


def test_the_draft_of_a_canary_is_no_mismatch_on_its_own_replicas_alone() -> None:
    view = ServingView(generation=1, draft=A, canary={"draft": B, "replicas": ["r0"]})
    assert ReplicaView(name="r0", reachable=True, draft=B).matches(view)
    assert ReplicaView(name="r1", reachable=True, draft=A).matches(view)
    assert not ReplicaView(name="r1", reachable=True, draft=B).matches(view)
    assert not ReplicaView(name="r0", reachable=True, draft="c" * 64).matches(view)


def test_each_source_that_is_down_is_named_in_its_place_and_hides_no_other(tmp_path: Path, spool: Path) -> None:
    engine, dead = FakeEngine("r0"), FakeEngine("r1")
    store = served(tmp_path, engine, dead)
    dead.healthy = False
    without_store = gather(sources(DownStore(), [engine, dead], spool), [], NOW)
    assert set(without_store.errors) == {"serving", "ledger", "waiting"}
    assert not without_store.blind
    text = screen(without_store)
    assert "serving.json cannot be read: read: repository svc-drafts: connection refused" in text
    assert f"answers      serves {A[:12]}; serving.json is not known" in text
    assert "r1           UNREACHABLE  r1: not healthy" in text
    without_spool = gather(sources(store, [engine], spool / "missing"), [], NOW)
    assert set(without_spool.errors) == {"spool"}
    assert "the spool cannot be read: spool" in screen(without_spool)

    def no_policy() -> int:
        raise ConfigError("policy.yaml is no YAML")

    broken = Sources(**{**vars(sources(store, [engine], spool)), "window_s": no_policy})
    assert gather(broken, [], NOW).errors == {"spool": "policy.yaml is no YAML"}


def test_when_nothing_can_be_read_it_is_blind(spool: Path) -> None:
    dead = FakeEngine("r0")
    dead.healthy = False
    assert gather(sources(DownStore(), [dead], spool / "missing"), [Part(name="lakefs", state="stopped")], NOW).blind
    assert not gather(sources(DownStore(), [dead], spool), [], NOW).blind, "the spool was read"


def test_a_fresh_service_has_nothing_and_says_so(spool: Path) -> None:
    found = gather(sources(MemoryStore(), [FakeEngine("r0")], spool), [], NOW)
    text = screen(found)
    assert found.errors == {}
    for words in ("nothing was promoted yet", "no drift report yet", "none recorded yet", "  nothing", "  empty"):
        assert words in text


def test_a_collapsed_length_and_an_idle_replica_are_told_apart(tmp_path: Path, spool: Path) -> None:
    engines = [FakeEngine(name) for name in ("r0", "r1", "r2")]
    store = served(tmp_path, *engines)

    def refuses() -> LiveFigures:
        raise EngineError("r2: /metrics: 404: start SGLang with --enable-metrics")

    live = {"r0": lambda: LiveFigures(accept_length=1.0), "r1": LiveFigures, "r2": refuses}
    ledger.append(store, REPOSITORY, "drift", drift("retrain", "bootstrap"), at=NOW)
    text = screen(gather(sources(store, engines, spool, live), [], NOW))
    assert "r0: length 1.00 now (SGLang's /metrics, last interval)  COLLAPSED" in text
    assert "r1: no length now" in text
    assert "start SGLang with --enable-metrics" in text
    assert "rate: no measured requests" in text


def test_a_reason_from_a_request_cannot_move_the_cursor_or_add_a_line(spool: Path) -> None:
    store = MemoryStore()
    evil = DriftReport.model_validate({**drift().model_dump(), "reasons": ("slice \x1b[2J\x9b31m\nreplicas\r\x07",)})
    ledger.append(store, REPOSITORY, "drift", evil, at=NOW)
    lines = status_text.lines(gather(sources(store, [], spool), [], NOW))
    assert all(line.text.isprintable() for line in lines)
    assert sum(line.text.startswith("replicas") for line in lines) == 1


def test_the_json_has_the_documented_fields_and_reads_back(tmp_path: Path, spool: Path) -> None:
    engine = FakeEngine("r0")
    found = gather(sources(served(tmp_path, engine), [engine], spool), [], NOW)
    content = json.loads(found.model_dump_json())
    assert set(content) == FIELDS
    assert content["serving"]["draft"] == content["replicas"][0]["draft"] == A
    assert Status.model_validate_json(found.model_dump_json()) == found


# What waits


def test_a_promotion_waits_from_its_request_until_it_is_settled(tmp_path: Path) -> None:
    store = served(tmp_path, FakeEngine("r0"))
    ledger.append(store, REPOSITORY, "verdict", verdict_on(B, A), at=NOW)
    assert waiting(store, REPOSITORY) == [], "nobody was asked"
    approvals.ask(store, REPOSITORY, REQUEST)
    [one] = waiting(store, REPOSITORY)
    assert (one.candidate, one.verdict, one.run) == (REQUEST.candidate, REQUEST.verdict, REQUEST.run)
    assert (one.since, one.expires_at, one.approved_by, one.approvers) == (
        REQUEST.asked_at,
        REQUEST.expires_at,
        (),
        1,
    )
    approvals.settle(store, REPOSITORY, REQUEST, approval_rules.refusal(REQUEST, "timeout", ["timeout"], NOW))
    assert waiting(store, REPOSITORY) == []


def test_the_screen_says_how_to_answer_what_waits(tmp_path: Path, spool: Path) -> None:
    engine = FakeEngine("r0")
    store = served(tmp_path, engine)
    approvals.ask(store, REPOSITORY, REQUEST)
    text = screen(gather(sources(store, [engine], spool), [], REQUEST.asked_at + 60))
    assert "0 of 1 approvals" in text
    assert f"tide approve {REQUEST.run}" in text


# The spool


def put(spool: Path, folder: str, name: str, at: float, size: int = 10) -> None:
    for suffix, length in ((".safetensors", size), (".json", 2)):
        path = spool / folder / f"{name}{suffix}"
        path.write_bytes(b"x" * length)
        os.utime(path, (at, at))


def test_the_backlog_counts_whole_files_and_the_age_of_the_oldest_closed_window(spool: Path) -> None:
    start = NOW // 300 * 300
    put(spool, "train", "old", start - 700)
    put(spool, "requests", "new", start + 1)
    (spool / "train" / ".hidden.json").write_text("{}")
    (spool / "held_out" / "unfinished.safetensors").write_bytes(b"12345")
    (spool / "quarantine" / "x.reason.json").write_text("{}")
    found = backlog(spool, start + 20, 300)
    assert found == Backlog(files=2, size=29, closed_files=1, oldest_closed_s=620.0, quarantined=1)
    assert backlog(spool, start + 300, 300).closed_files == 2, "the window ends with its last second"
    assert backlog(spool, start + 299.9, 300).closed_files == 1


def test_a_spool_that_is_not_there_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TIDE_SPOOL"):
        backlog(tmp_path / "none", NOW, 300)


# Live figures

PAGE = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 1.8
sglang:spec_accept_length{model_name="m",tp_rank="1"} 1.6
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 3.0
# TYPE tide_capture_dropped_rows counter
tide_capture_dropped_rows_total{reason="quota"} 4.0
tide_capture_dropped_rows_total{reason="stage"} 1.0
tide_capture_dropped_rows_created{reason="stage"} 1.7e9
"""


def test_a_page_of_metrics_is_read_over_ranks_and_reasons() -> None:
    found = sglang_metrics.parse("r0", PAGE)
    assert found == LiveFigures(accept_length=(1.8 + 1.6) / 2, running=3.0, capture={"dropped_rows_total": 5.0})
    assert sglang_metrics.parse("r0", PAGE.replace("1.8", "0.0").replace("1.6", "0.0")).accept_length is None
    assert sglang_metrics.parse("r0", "") == LiveFigures()


def test_what_is_no_page_of_metrics_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="no page of Prometheus metrics"):
        sglang_metrics.parse("r0", "<html>not metrics</html>")
    with pytest.raises(EngineUnavailable, match="GET /metrics"):
        sglang_metrics.read_live("r0", "http://127.0.0.1:9", timeout_s=1)


# The command


def test_the_command_on_a_home_without_a_stack_is_blind_and_still_shows_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_LAKEFS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TIDE_REPLICAS", "r0=http://127.0.0.1:9")
    result = CliRunner().invoke(cli.app, ["status", "--json", "--home", str(tmp_path)])
    content = json.loads(result.output)
    assert result.exit_code == 1
    assert {p["name"] for p in content["parts"]} >= {"lakefs", "prefect", "sglang"}
    assert set(content["errors"]) == {"serving", "ledger", "waiting", "spool"}
    assert "127.0.0.1" in content["replicas"][0]["detail"] or "refused" in content["replicas"][0]["detail"]


def test_the_command_waits_for_no_slow_import() -> None:
    code = """
import sys
from tide.cli.status import sources_of
from tide.config import Settings
sources_of(Settings())
print(sorted({"torch", "prefect", "evidently", "pandas", "sglang", "matplotlib"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
