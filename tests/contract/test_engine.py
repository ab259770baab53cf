"""What every engine keeps to: the fake that flows are tested with, and the SGLang client before a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fakes.fake_engine import FakeEngine
from tide.engine.base import Engine
from tide.engine.sglang import SglangEngine
from tide.errors import EngineError, EngineUnavailable, SwapRefused

OLD, NEW, UNKNOWN = "1" * 64, "2" * 64, "3" * 64
CHAT = [{"role": "user", "content": "hello there"}]


class Replica:
    """As much of an SGLang server as the client talks to."""

    def __init__(self) -> None:
        self.draft, self.paused, self.healthy = OLD, False, True

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        if not self.healthy:
            raise httpx.ConnectError("gone")
        routes: dict[str, Callable[[dict[str, Any]], httpx.Response]] = {
            "/server_info": self.info,
            "/pause_generation": lambda _: self.pause(True),
            "/continue_generation": lambda _: self.pause(False),
            "/update_weights_from_disk": self.swap,
            "/v1/chat/completions": self.chat,
            "/set_internal_state": self.set_state,
        }
        return routes.get(request.url.path, lambda _: httpx.Response(200))(body)

    def info(self, _body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json={"version": "0", "internal_states": [{"tide": {"draft": self.draft}}]})

    def pause(self, paused: bool) -> httpx.Response:
        self.paused = paused
        return httpx.Response(200, json={})

    def swap(self, body: dict[str, Any]) -> httpx.Response:
        assert self.paused
        if body["model_path"] not in (OLD, NEW):
            return httpx.Response(400, json={"success": False, "message": "draft is not here"})
        before, self.draft = self.draft, body["model_path"]
        message = json.dumps({"before": before, "after": self.draft, "seconds": 0.0})
        return httpx.Response(200, json={"success": True, "message": message})

    def set_state(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json=[0 <= body["server_args"]["tide_sample_rate"] <= 1])

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        assert not self.paused
        tokens = body["max_completion_tokens"]
        meta = {"id": body.get("rid", "r"), "prompt_tokens": 2, "completion_tokens": tokens, "spec_verify_ct": tokens}
        meta |= {"spec_num_proposed_drafts": 3 * tokens, "spec_num_correct_drafts": 0}
        choice = {"message": {"content": "hi"}, "finish_reason": "length", "meta_info": meta}
        return httpx.Response(200, json={"choices": [choice], "sglext": {"output_ids": [list(range(tokens))]}})


class Case:
    """An engine, and a switch for its health."""

    def __init__(self, engine: Engine, set_health: Callable[[bool], None]) -> None:
        self.engine, self.set_health = engine, set_health


@pytest.fixture(params=["fake", "sglang"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "fake":
        fake = FakeEngine(draft=OLD, known={OLD, NEW})
        return Case(fake, lambda healthy: setattr(fake, "healthy", healthy))
    replica = Replica()
    engine = SglangEngine("http://replica:1", transport=httpx.MockTransport(replica))
    return Case(engine, lambda healthy: setattr(replica, "healthy", healthy))


def test_a_swap_changes_the_draft_and_reports_both(case: Case) -> None:
    result = case.engine.swap_draft(NEW)
    assert (result.before, result.after, case.engine.active_draft()) == (OLD, NEW, NEW)
    assert case.engine.facts().draft == NEW
    assert result.seconds >= 0


def test_a_swap_to_the_draft_in_serving_is_no_error(case: Case) -> None:
    assert case.engine.swap_draft(OLD).after == OLD


def test_a_refused_swap_leaves_the_draft_and_generation_goes_on(case: Case) -> None:
    with pytest.raises(SwapRefused):
        case.engine.swap_draft(UNKNOWN)
    assert case.engine.active_draft() == OLD
    assert case.engine.generate(CHAT, max_new_tokens=4).completion_tokens == 4


@pytest.mark.parametrize("rate", [0.0, 0.01, 1.0])
def test_a_capture_rate_from_0_to_1_is_taken(case: Case, rate: float) -> None:
    case.engine.set_capture_rate(rate)


@pytest.mark.parametrize("rate", [-0.01, 1.01])
def test_a_capture_rate_that_is_no_share_is_refused(case: Case, rate: float) -> None:
    with pytest.raises(EngineError, match=f"capture rate of {rate} was refused"):
        case.engine.set_capture_rate(rate)


def test_an_answer_has_counters_that_add_up(case: Case) -> None:
    answer = case.engine.generate(CHAT, max_new_tokens=6, request="mine", conversation="c", slice="s")
    assert answer.request == "mine"
    assert answer.completion_tokens == len(answer.output_ids) == 6
    assert answer.verify_steps is not None
    assert answer.proposed is not None
    assert answer.accepted is not None
    assert 0 <= answer.accepted <= answer.proposed
    assert answer.proposed % answer.verify_steps == 0


def test_a_probe_is_a_short_answer_with_verify_steps(case: Case) -> None:
    answer = case.engine.probe(timeout_s=5.0)
    assert answer.completion_tokens > 1
    assert answer.verify_steps


def test_a_replica_that_is_gone_is_unavailable_in_every_way(case: Case) -> None:
    case.engine.check_health()
    case.set_health(False)
    calls: list[Callable[[], object]] = [
        case.engine.check_health,
        case.engine.facts,
        case.engine.active_draft,
        case.engine.flush_cache,
        lambda: case.engine.set_capture_rate(0.5),
        lambda: case.engine.generate(CHAT, max_new_tokens=1),
        lambda: case.engine.probe(timeout_s=5.0),
    ]
    for call in calls:
        with pytest.raises(EngineUnavailable) as caught:
            call()
        assert caught.value.transient


def test_a_replica_has_a_name(case: Case) -> None:
    assert case.engine.name
