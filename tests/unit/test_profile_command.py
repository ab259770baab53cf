"""`tide profile` and what verdicts read of it: the record on the ledger, and the load of the last day."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tasks import throughput
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.tiny import TARGET
from tide import cli, repositories, wiring
from tide.config import Settings
from tide.domain import EngineProfile, Snapshot
from tide.engine.base import Engine, Generation
from tide.states.requests import REQUEST_SCHEMA, request_row
from tide.throughput import profiles

STATES, DRAFTS = "svc-states", "svc-drafts"


class Timed(FakeEngine):
    """A token takes 10 ms without speculation, a verify step 15 ms."""

    def generate(self, messages: Sequence[dict[str, str]], **options: Any) -> Generation:  # type: ignore[override]
        made = super().generate(messages, **options)
        steps = made.verify_steps if self._steps else made.completion_tokens - 1
        counted = {"verify_steps": made.verify_steps if self._steps else None}
        latency = 0.02 + 0.001 * made.prompt_tokens + (steps or 0) * (0.015 if self._steps else 0.01)
        return made.model_copy(update=counted | {"latency_s": latency})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store, config = MemoryStore(), Settings(service="svc", home=tmp_path)
    repositories.ensure(store, STATES)
    repositories.ensure_drafts(store, DRAFTS)
    engines: dict[str, Engine] = {"http://plain": Timed("plain", steps=0), "http://one": Timed("one", steps=1)}

    def settings() -> Settings:
        return config

    settings.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(wiring, "settings", settings)
    monkeypatch.setattr(wiring, "store", lambda _config: store)
    monkeypatch.setattr(wiring, "engines", lambda _config: [Timed("r0", steps=3, target=TARGET)])
    monkeypatch.setattr(wiring, "engines_at", lambda addresses: [engines[a] for a in addresses])
    return store


def run(*arguments: str, home: Path) -> Any:
    return CliRunner().invoke(cli.app, ["profile", "--plain", "http://plain", "--home", str(home), *arguments])


def test_the_serving_replica_is_measured_and_the_profile_written_and_recorded(
    store: MemoryStore, tmp_path: Path
) -> None:
    result = run("--concurrency", "1,4", "--repeats", "1", home=tmp_path)
    assert result.exit_code == 0, result.output
    assert "holds for 3 draft steps alone" in result.output
    written = EngineProfile.model_validate_json((tmp_path / "profile.json").read_text())
    assert profiles.newest_for(store, DRAFTS, TARGET) == written
    assert throughput.profile_for(TARGET, steps=3) == written
    assert throughput.profile_for(TARGET, steps=2) is None
    assert [(p.concurrency, round(p.plain_step_s, 6), round(p.verify_step_s, 6)) for p in written.points] == [
        (1, 0.01, 0.015),
        (4, 0.01, 0.015),
    ]


def test_engines_can_be_named_and_the_file_too(store: MemoryStore, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere.json"
    wiring.engines_at(["http://one"])[0].target = TARGET  # type: ignore[attr-defined]
    result = run("--speculative", "http://one", "--repeats", "1", "--json", "--out", str(out), home=tmp_path)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 1
    assert out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--concurrency", "1,x"), "numbers with commas"),
        (("--concurrency", "4,1"), "rising numbers"),
        (("--repeats", "0"), "--repeats"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], says: str, store: MemoryStore, tmp_path: Path) -> None:
    result = run(*arguments, home=tmp_path)
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert not (tmp_path / "profile.json").exists()


def window(store: MemoryStore, name: str, replica: str, *rows: dict[str, Any]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=REQUEST_SCHEMA), sink)
    branch = f"harvest-{name}-{replica}"
    store.create_branch(STATES, branch, "main")
    store.put(STATES, branch, f"windows/{name}/{replica}/requests.parquet", bytes(sink.getvalue()))
    store.commit(STATES, branch, "harvest", {"tide.window": name})
    store.merge(STATES, branch, "main", "harvest", {"tide.window": name})


def snapshot(store: MemoryStore, *windows: str) -> Snapshot:
    commit = store.head(STATES, "main").id
    return Snapshot(
        repository=STATES, commit=commit, target=TARGET, windows=windows, shards=0, requests=0, rows=0, drafts=()
    )


def test_the_load_is_that_of_the_last_day_each_replica_for_itself(store: MemoryStore) -> None:
    def row(name: str, start: float, finish: float) -> dict[str, Any]:
        return request_row(name, start, finish, response_tokens=40, prompt_tokens=30, cached_tokens=10)

    window(store, "20260101T000000Z", "r0", *(row(f"old-{i}", 0, 10) for i in range(9)))
    window(store, "20260110T000000Z", "r0", row("a", 0, 10), row("b", 5, 15))
    window(store, "20260110T000500Z", "r1", row("c", 0, 10), row("d", 5, 15))
    names = ("20260101T000000Z", "20260110T000000Z", "20260110T000500Z")
    found = throughput.load_of(snapshot(store, *names))
    assert found.concurrency == {1: 0.5, 2: 0.5}
    assert (found.prompt_tokens, found.output_tokens, found.requests) == (20, 40, 4)


def test_a_snapshot_without_windows_has_no_load(store: MemoryStore) -> None:
    assert throughput.load_of(snapshot(store)).concurrency == {}
