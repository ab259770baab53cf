"""Captured rows against transformers, row by row, in float32, with drafts that are really accepted.

Each server shape is started once and gets the same traffic: eight mixed requests at once, twice (the second time the
oracle has learnt and drafts are accepted), then prefix hits, an abort, and the chat and completion routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.capture import LAYERS, MESSAGES, PROMPTS, Captured, Client, Truth, plugin_env, wait_for
from tests.support.sglang_server import SglangServer
from tide.errors import ServiceError
from tide.sglang_plugin.admission import request_hash
from tide.states.requests import read_table
from tide.states.shard_checks import validate_shard

pytestmark = pytest.mark.timeout(1500)

SHAPES: dict[str, dict[str, Any]] = {
    "chain-chunked": {
        "server": {"extra_args": ("--chunked-prefill-size", "48")},
        "plugin": {"TIDE_PROMPT_ROWS": "100000"},
    },
    "overlap-mixed-page4": {
        "server": {"extra_args": ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--page-size", "4")},
        "plugin": {"TIDE_CPU_OVERLAP": "1", "TIDE_PROMPT_ROWS": "16"},
    },
    "tree-retracted": {
        "server": {"topk": 4, "draft_tokens": 8},
        "plugin": {
            "TIDE_CPU_OVERLAP": "1",
            "TIDE_TEST_SECOND_BEST": "1",
            "SGLANG_TEST_RETRACT": "1",
            "TIDE_PROMPT_ROWS": "64",
        },
    },
}


@dataclass(frozen=True)
class Served:
    """A server after its traffic."""

    client: Client
    answers: dict[str, dict[str, Any]]
    """By rid; only of /generate."""
    prompts: dict[str, list[int]]
    """Prompt ids by rid, of all requests that must have left rows."""
    prompt_rows: int
    fault: Path

    def rows(self) -> Iterator[tuple[str, list[int], Captured]]:
        for rid, prompt in self.prompts.items():
            yield rid, prompt, self.client.captured(rid)


@pytest.fixture(scope="module")
def truth(target_model: Path) -> Truth:
    return Truth(target_model)


@pytest.fixture(scope="module", params=list(SHAPES))
def served(
    request: pytest.FixtureRequest,
    target_model: Path,
    random_draft: Path,
    truth: Truth,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    shape, home = SHAPES[request.param], tmp_path_factory.mktemp(request.param)
    (home / "dump").mkdir()
    env = plugin_env(home / "dump", TIDE_TEST_FAULT=str(home / "fault"), **shape["plugin"])
    with SglangServer(
        home, target_model, draft=random_draft, dtype="float32", spool=home / "spool", env=env, **shape["server"]
    ) as server:
        client = Client(server, home / "spool", home / "dump")
        answers, prompts = send_traffic(client, truth.tokenizer)
        yield Served(client, answers, prompts, int(shape["plugin"]["TIDE_PROMPT_ROWS"]), home / "fault")


def send_traffic(client: Client, tokenizer: Any) -> tuple[dict[str, dict[str, Any]], dict[str, list[int]]]:
    """The same requests on every server; answers of /generate, and the prompts of all that must leave rows."""
    answers: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    for tag in ("cold", "warm"):
        for name, answer in client.mixed(tag).items():
            answers[f"{tag}-{name}"], texts[f"{tag}-{name}"] = answer, PROMPTS[name]
    for rid, text in (
        ("hit-same", PROMPTS["long"]),
        ("hit-turn", PROMPTS["long"] + "In the end,"),
        ("../trav", "Hello"),
    ):
        answers[rid], texts[rid] = client.generate(rid, text), text
    texts["aborted"] = "Please count for a very long time: " + PROMPTS["stop"]
    assert client.abort_midway("aborted", texts["aborted"]) > 8
    texts["completion"] = PROMPTS["turn"]
    body = {"model": "m", "prompt": texts["completion"], "max_tokens": 20, "temperature": 0, "rid": "completion"}
    client.server.post("/v1/completions", body)
    client.chat("chat")
    prompts = {rid: tokenizer.encode(text) for rid, text in texts.items()}
    prompts["chat"] = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    return answers, prompts


def test_every_row_equals_the_target_s_own_states(served: Served, truth: Truth) -> None:
    worst = {rid: float(truth.errors(prompt, found).max()) for rid, prompt, found in served.rows()}
    assert {rid: error for rid, error in worst.items() if not error < 1e-4} == {}


def test_there_is_a_row_for_every_token_that_a_forward_pass_saw(served: Served) -> None:
    for rid, prompt, found in served.rows():
        assert found.ids == [*prompt, *found.ids[len(prompt) - found.first :]][found.first :], rid
        assert found.aux.shape[0] == found.last.shape[0] == len(found.ids) - 1, rid
        assert found.prompt_len == len(prompt), rid
        if rid in served.answers:
            assert found.ids[len(prompt) - found.first :] == served.answers[rid]["output_ids"], rid


def test_only_cached_and_trimmed_prompt_rows_are_missing(served: Served) -> None:
    for rid, prompt, found in served.rows():
        if rid not in served.answers:
            continue
        meta = served.answers[rid]["meta_info"]
        if meta.get("num_retractions"):
            continue  # a retracted request is counted as cached by what its last prefill found
        trimmed = max(0, len(prompt) - served.prompt_rows)
        assert found.first in {meta["cached_tokens"], max(meta["cached_tokens"], trimmed)}, rid


def test_each_request_s_rows_name_the_tokens_that_followed(served: Served, truth: Truth) -> None:
    agreement = {rid: truth.agreement(found) for rid, _, found in served.rows() if "json" not in rid}
    assert {rid: share for rid, share in agreement.items() if share < 0.96} == {}


def test_the_drafts_were_accepted_or_this_shows_nothing(served: Served) -> None:
    warm = [a["meta_info"] for rid, a in served.answers.items() if rid.startswith("warm") and "json" not in rid]
    tokens = sum(m["completion_tokens"] for m in warm)
    steps = sum(m.get("spec_verify_ct", 0) for m in warm)
    assert tokens / steps > 2, f"acceptance length {tokens / steps:.2f}"


def test_nothing_was_dropped_and_the_target_is_named_as_it_runs(served: Served) -> None:
    state = served.client.state()
    assert state["self_check"] == "passed"
    assert state["capture"]["enabled"]
    assert state["capture"]["dropped"] == {}
    assert tuple(state["target"]["aux_layers"]) == LAYERS
    assert state["target"]["dtype"] == "float32"


def test_an_opted_out_request_leaves_no_row_by_any_route(served: Served) -> None:
    client, before = served.client, set(served.client.dump.iterdir())
    client.generate("out-flag", "Keep nothing of this", no_logs=True)
    client.generate("out-params", "Keep nothing of that", params={"custom_params": {"tide": {"no_logs": True}}})
    client.chat("out-chat", custom_params={"tide": {"no_logs": True, "conversation": "private"}})
    client.generate("kept", "Keep this", params={"custom_params": {"tide": {"conversation": "c", "slice": "mine"}}})
    rows = table(served, {"out-flag", "out-params", "out-chat", "kept"})
    assert {p.name for p in set(client.dump.iterdir()) - before} == {client.path("kept").name}
    for rid in ("out-flag", "out-params", "out-chat"):
        row = rows[rid]
        assert (row["opted_out"], row["captured_rows"]) == (True, 0)
        assert [row[c] for c in ("conversation", "slice", "split", "script", "token_sketch", "pooled")] == [None] * 6
    assert rows["kept"]["slice"] == "mine"


def test_the_table_has_every_request_with_the_counters_its_client_saw(served: Served) -> None:
    rows = table(served, set(served.prompts))
    for rid, answer in served.answers.items():
        meta, row = answer["meta_info"], rows[rid]
        assert row["response_tokens"] == meta["completion_tokens"], rid
        assert row["prompt_tokens"] == meta["prompt_tokens"], rid
        assert row["cached_tokens"] == meta["cached_tokens"], rid
        assert row["verify_steps"] == (meta.get("spec_verify_ct") or None), rid
        assert row["proposed"] == meta.get("spec_num_proposed_drafts"), rid
        assert row["captured_rows"] == served.client.captured(rid).aux.shape[0], rid
    assert rows["aborted"]["finish_reason"] == "abort"
    assert rows["cold-one"]["verify_steps"] is None


def test_the_shards_on_disk_are_valid_and_mean_what_they_say(served: Served, truth: Truth) -> None:
    paths = list(served.client.spool.glob("*/*.safetensors"))
    assert paths
    names = {path.parent.name: set[str]() for path in paths}
    for path in paths:
        manifest = validate_shard(path, head=None if served.client.server.options.topk > 1 else truth.head)
        names[path.parent.name] |= {r.conversation for r in manifest.requests}
    assert not names.get("train", set()) & names.get("held_out", set())
    assert not [p for p in served.client.spool.rglob("*") if "trav" in p.name]


def test_the_server_s_metrics_show_the_counters(served: Served) -> None:
    text = httpx.get(f"{served.client.server.url}/metrics", timeout=60, trust_env=False).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tide_capture_"))
    assert float(values["tide_capture_rows_total"]) > 0
    assert float(values["tide_capture_enabled"]) == 1


def test_a_fault_inside_the_tap_ends_capture_and_not_serving(served: Served) -> None:
    served.fault.touch()
    answer = served.client.generate("faulty", PROMPTS["short"], "short")
    assert answer["output_ids"] == served.answers["warm-short"]["output_ids"]
    capture = served.client.state()["capture"]
    assert not capture["enabled"]
    assert "a fault made by a test" in capture["off_reason"]


def test_a_server_that_could_capture_nothing_does_not_start(target_model: Path, tmp_path: Path) -> None:
    server = SglangServer(tmp_path, target_model, spool=tmp_path / "spool")
    with pytest.raises(ServiceError, match="ended"), server:
        pass
    log = (tmp_path / "logs" / "sglang.log").read_text()
    assert "tide cannot capture in this configuration: speculative_algorithm=None" in log


def table(served: Served, rids: set[str]) -> dict[str, dict[str, Any]]:
    """Rows of the request table by rid, once all have arrived."""
    names = {request_hash(b"a key for capture tests", rid): rid for rid in rids}
    found: dict[str, dict[str, Any]] = {}

    def complete() -> bool:
        for path in served.client.spool.glob("requests/*.parquet"):
            if path.with_suffix(".json").exists():
                found.update({names[r["request"]]: r for r in read_table([path]).to_pylist() if r["request"] in names})
        return set(found) == rids

    wait_for(complete, f"table rows of {rids}")
    return found
