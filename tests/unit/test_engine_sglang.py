"""The SGLang client without a server: what it sends, what it makes of answers, and that no pause outlives a swap."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tide.engine import sglang as module
from tide.engine.base import Speculation
from tide.engine.sglang import SglangEngine
from tide.errors import EngineError, EngineUnavailable, SwapRefused

OLD, NEW = "1" * 64, "2" * 64
SWAPPED = {"success": True, "message": json.dumps({"before": OLD, "after": NEW, "seconds": 0.05})}
TARGET = {"weights": "a" * 64, "tokenizer": "b" * 64, "dtype": "bfloat16", "quantization": None}
TARGET |= {"hidden_size": 16, "vocab_size": 50, "aux_layers": [1, 2, 3]}

Answer = httpx.Response | Exception | BaseException
Script = dict[str, Answer | Callable[[httpx.Request], Answer]]


class Server:
    """Answers by path, and remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script, self.asked = script, list[tuple[str, Any]]()
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append((path, json.loads(request.content) if request.content else None))
        self.headers.append(request.headers)
        answer = self.script.get(path, httpx.Response(200, json={"status": "ok"}))
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def engine_of(script: Script, **options: Any) -> tuple[SglangEngine, Server]:
    server = Server(script)
    options = {"admin_key": "key", **options}
    return SglangEngine("http://127.0.0.1:31000", transport=httpx.MockTransport(server), **options), server


def info(*states: Any, **fields: Any) -> httpx.Response:
    body = {"version": "0.5.23", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
    body |= {"speculative_num_draft_tokens": 4, "internal_states": list(states)}
    return httpx.Response(200, json=body | fields)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _s: None)


def test_a_swap_pauses_in_place_swaps_by_digest_and_continues() -> None:
    engine, server = engine_of({"/update_weights_from_disk": httpx.Response(200, json=SWAPPED)})
    result = engine.swap_draft(NEW)
    assert (result.before, result.after) == (OLD, NEW)
    assert server.asked == [
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", {"model_path": NEW, "manifest": {"selector": "draft"}, "flush_cache": False}),
        ("/continue_generation", {}),
    ]
    assert {h["authorization"] for h in server.headers} == {"Bearer key"}


def test_a_refused_swap_tells_the_reason_and_continues() -> None:
    refusal = httpx.Response(400, json={"success": False, "message": "draft swap refused: fc.weight is not finite"})
    engine, server = engine_of({"/update_weights_from_disk": refusal})
    with pytest.raises(SwapRefused, match=r"fc\.weight is not finite"):
        engine.swap_draft(NEW)
    assert server.paths[-1] == "/continue_generation"


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (httpx.ReadTimeout("slow"), EngineUnavailable),
        (httpx.ConnectError("gone"), EngineUnavailable),
        (httpx.RemoteProtocolError("cut"), EngineUnavailable),
        (httpx.Response(503, text="down"), EngineUnavailable),
        (httpx.Response(500, text="boom"), SwapRefused),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk"])
def test_generation_continues_whatever_happens(failure: Answer, raised: type[BaseException], path: str) -> None:
    engine, server = engine_of({"/update_weights_from_disk": httpx.Response(200, json=SWAPPED)} | {path: failure})
    with pytest.raises(raised):
        engine.swap_draft(NEW)
    assert server.paths[-1] == "/continue_generation"


def test_a_refused_key_is_a_refused_swap_and_not_a_replica_left_paused() -> None:
    closed = httpx.Response(401, json={"error": "Unauthorized"})
    routes: Script = dict.fromkeys(("/pause_generation", "/update_weights_from_disk", "/continue_generation"), closed)
    engine, server = engine_of(routes)
    with pytest.raises(SwapRefused, match="admin key was refused"):
        engine.swap_draft(NEW)
    assert server.paths == ["/pause_generation"]


def test_continue_is_tried_again_until_it_is_heard() -> None:
    answers = [httpx.ConnectError("1"), httpx.Response(503), httpx.Response(200, json={})]
    script: Script = {
        "/update_weights_from_disk": httpx.Response(200, json=SWAPPED),
        "/continue_generation": lambda _request: answers.pop(0),
    }
    engine, server = engine_of(script)
    assert engine.swap_draft(NEW).after == NEW
    assert server.paths.count("/continue_generation") == 3


def test_a_replica_that_cannot_be_continued_is_reported_as_paused() -> None:
    script: Script = {
        "/update_weights_from_disk": httpx.Response(200, json=SWAPPED),
        "/continue_generation": httpx.ConnectError("gone"),
    }
    engine, _ = engine_of(script)
    with pytest.raises(EngineUnavailable, match="may still be paused"):
        engine.swap_draft(NEW)


def test_stock_weights_updated_without_our_plugin_are_no_swap() -> None:
    stock = httpx.Response(200, json={"success": True, "message": "Succeeded to update model weights."})
    engine, server = engine_of({"/update_weights_from_disk": stock})
    with pytest.raises(EngineError, match="not by the tide plugin"):
        engine.swap_draft(NEW)
    assert server.paths[-1] == "/continue_generation"


def test_facts_come_from_the_server_and_the_plugin() -> None:
    tide = {"draft": OLD, "draft_contract": None, "target": TARGET, "capture": {"rows": 5}}
    engine, _ = engine_of({"/server_info": info({"tide": tide})})
    facts = engine.facts()
    assert (facts.engine, facts.draft, facts.capture) == ("sglang 0.5.23", OLD, {"rows": 5})
    assert (facts.speculative_steps, facts.speculative_topk, facts.draft_tokens) == (3, 1, 4)
    assert facts.target is not None
    assert facts.target.aux_layers == (1, 2, 3)
    assert engine.active_draft() == OLD


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "no tide plugin"),
        ([{}], "no tide plugin"),
        ([{"tide": {}}], "no tide plugin"),
        ([{"tide": {"draft": OLD}}, {"tide": {"draft": NEW}}], "different drafts"),
        ([{"tide": {"draft": OLD, "target": {"weights": "?"}}}], "not of this version"),
    ],
)
def test_a_server_that_does_not_report_one_draft_is_an_error(states: list[Any], message: str) -> None:
    engine, _ = engine_of({"/server_info": info(*states)})
    with pytest.raises(EngineError, match=message):
        engine.facts()


def test_how_a_server_decodes_is_known_without_the_plugin() -> None:
    plain = {"speculative_num_steps": None, "speculative_eagle_topk": None, "speculative_num_draft_tokens": None}
    engine, _ = engine_of({"/server_info": info({}, speculative_algorithm=None, **plain)})
    assert engine.speculation() == Speculation(
        engine="sglang 0.5.23", speculative=False, steps=0, topk=0, draft_tokens=0
    )
    engine, _ = engine_of({"/server_info": info({}, speculative_algorithm="EAGLE3")})
    assert engine.speculation() == Speculation(
        engine="sglang 0.5.23", speculative=True, steps=3, topk=1, draft_tokens=4
    )


def test_a_server_that_verifies_without_a_draft_speculates_with_no_steps() -> None:
    fields = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 0, "speculative_num_draft_tokens": 1}
    engine, _ = engine_of({"/server_info": info({}, **fields)})
    assert (engine.speculation().speculative, engine.speculation().steps) == (True, 0)


def chat(**meta: Any) -> httpx.Response:
    meta = {"id": "r1", "prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 2, **meta}
    choice = {"message": {"content": "hello"}, "finish_reason": "stop", "meta_info": meta}
    return httpx.Response(200, json={"choices": [choice], "sglext": {"output_ids": [[5, 6, 7, 8]]}})


def test_an_answer_has_the_counters_of_its_own_request() -> None:
    counters = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 2}
    engine, server = engine_of({"/v1/chat/completions": chat(**counters)})
    answer = engine.generate(
        [{"role": "user", "content": "hi"}], max_new_tokens=4, conversation="c", slice="s", request="r1", no_logs=True
    )
    assert (answer.request, answer.text, answer.output_ids) == ("r1", "hello", (5, 6, 7, 8))
    assert (answer.verify_steps, answer.proposed, answer.accepted, answer.cached_tokens) == (2, 6, 2, 2)
    body = server.asked[0][1]
    assert body["custom_params"] == {"tide": {"conversation": "c", "slice": "s", "no_logs": True}}
    assert (body["rid"], body["max_completion_tokens"], body["temperature"]) == ("r1", 4, 0.0)


def test_an_answer_without_a_verify_step_is_unmeasured_not_zero() -> None:
    engine, _ = engine_of({"/v1/chat/completions": chat()})
    answer = engine.generate([{"role": "user", "content": "hi"}], max_new_tokens=4)
    assert (answer.verify_steps, answer.proposed, answer.accepted) == (None, None, None)


def test_an_answer_of_another_server_is_an_engine_error() -> None:
    other = httpx.Response(200, json={"choices": [{"message": {"content": "x"}}]})
    engine, _ = engine_of({"/v1/chat/completions": other})
    with pytest.raises(EngineError, match="is this SGLang"):
        engine.generate([{"role": "user", "content": "hi"}], max_new_tokens=4)


def test_a_dead_scheduler_is_found_by_generating_within_a_limit() -> None:
    seen: list[Any] = []

    def slow(request: httpx.Request) -> Answer:
        seen.append(request.extensions["timeout"]["read"])
        return httpx.ReadTimeout("no token")

    engine, _ = engine_of({"/health_generate": slow}, health_timeout_s=7.0)
    with pytest.raises(EngineUnavailable, match="ReadTimeout"):
        engine.check_health()
    assert seen == [7.0]


def test_a_probe_is_no_traffic_and_has_its_own_limit() -> None:
    seen: list[Any] = []

    def answer(request: httpx.Request) -> Answer:
        seen.append((json.loads(request.content)["custom_params"]["tide"], request.extensions["timeout"]["read"]))
        return chat(spec_verify_ct=2)

    engine, _ = engine_of({"/v1/chat/completions": answer})
    assert engine.probe(timeout_s=7.0).verify_steps
    assert seen == [({"slice": "tide-probe", "no_logs": True}, 7.0)]


def test_an_unhealthy_answer_is_unavailable_and_transient() -> None:
    engine, _ = engine_of({"/health_generate": httpx.Response(503)})
    with pytest.raises(EngineUnavailable) as caught:
        engine.check_health()
    assert caught.value.transient


def test_a_busy_replica_refuses_to_flush_with_its_reason() -> None:
    engine, _ = engine_of({"/flush_cache": httpx.Response(400, text="pending requests")})
    with pytest.raises(EngineError, match="pending requests"):
        engine.flush_cache()


def test_a_replica_is_named_by_host_and_port_unless_told() -> None:
    assert engine_of({})[0].name == "127.0.0.1:31000"
    assert engine_of({}, name="r0")[0].name == "r0"
