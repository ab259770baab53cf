"""Whose states are captured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tide.domain import PROBE_SLICE, Split, split_of
from tide.sglang_plugin.admission import Admitter, RequestFacts, length_bucket, opted_out, request_hash

KEY = b"a key for tests"
PROMPT = tuple(range(40))


def admitter(**changes: Any) -> Admitter:
    return Admitter(KEY, **{"sample_rate": 1.0, "min_tokens": 2, "max_tokens": 100, **changes})


def facts(rid: str = "r1", **changes: Any) -> RequestFacts:
    return RequestFacts(**{"rid": rid, "input_ids": PROMPT, "max_new_tokens": 16, **changes})


def test_an_ordinary_request_is_admitted_with_a_conversation_and_its_split() -> None:
    decision = admitter().decide(facts())
    assert decision.admitted
    assert decision.conversation is not None
    assert decision.split is split_of(decision.conversation)


def test_the_rid_never_appears_in_what_leaves_the_engine() -> None:
    decision = admitter().decide(facts("../../etc/passwd"))
    assert decision.request == request_hash(KEY, "../../etc/passwd")
    assert decision.request.isalnum()


@pytest.mark.parametrize(
    ("no_logs", "params"),
    [
        (True, None),
        (False, {"no_logs": True}),
        (False, {"tide": {"no_logs": True}}),
        (False, {"tide": {"no_logs": "yes"}}),
        (False, {"tide": {"no_logs": 1}}),
        (False, {"tide": "no_logs"}),
        (False, "unreadable"),
        ("true", None),
    ],
)
def test_an_opt_out_in_any_form_or_unreadable_keeps_nothing(no_logs: Any, params: Any) -> None:
    decision = admitter().decide(facts(no_logs=no_logs, custom_params=params))
    assert (decision.admitted, decision.reason, decision.opted_out) == (False, "no_logs", True)
    assert (decision.conversation, decision.slice, decision.split) == (None, None, None)


def test_a_probe_keeps_its_slice_and_nothing_else_when_it_opts_out() -> None:
    params: dict[str, Any] = {"tide": {"no_logs": True, "slice": PROBE_SLICE, "conversation": "mine"}}
    decision = admitter().decide(facts(custom_params=params))
    assert (decision.opted_out, decision.slice, decision.conversation) == (True, PROBE_SLICE, None)
    params["tide"]["slice"] = "a customer's word"
    assert admitter().decide(facts(custom_params=params)).slice is None


@pytest.mark.parametrize("params", [None, {}, {"tide": {}}, {"tide": {"no_logs": False}}, {"other": {"no_logs": True}}])
def test_a_request_without_the_flag_has_not_opted_out(params: Any) -> None:
    assert not opted_out(False, params)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora": True}, "lora"),
        ({"multimodal": True}, "multimodal"),
        ({"input_embeds": True}, "input_embeds"),
        ({"beam": True}, "beam"),
        ({"max_new_tokens": 0}, "prefill_only"),
        ({"input_ids": tuple(range(101))}, "too_long"),
        ({"input_ids": (), "max_new_tokens": 1}, "too_short"),
    ],
)
def test_what_a_draft_cannot_learn_from_is_excluded_with_its_reason(change: dict[str, Any], reason: str) -> None:
    decision = admitter().decide(facts(**change))
    assert (decision.admitted, decision.reason, decision.opted_out) == (False, reason, False)


def test_sampling_takes_the_asked_share_and_always_the_same_requests() -> None:
    first = [admitter(sample_rate=0.25).decide(facts(f"r{i}")).admitted for i in range(4000)]
    again = [admitter(sample_rate=0.25).decide(facts(f"r{i}")).admitted for i in range(4000)]
    assert first == again
    assert 0.22 < sum(first) / len(first) < 0.28


def test_a_rate_of_zero_samples_nothing_and_keeps_the_identity_for_the_table() -> None:
    decision = admitter(sample_rate=0.0).decide(facts())
    assert decision.reason == "sampled_out"
    assert decision.conversation is not None


def test_turns_of_one_conversation_share_a_split_by_name_session_or_first_turn() -> None:
    rules = admitter(turn=lambda ids: ids[:10])
    named = [
        rules.decide(facts(f"n{i}", input_ids=PROMPT[i:], custom_params={"tide": {"conversation": "c"}}))
        for i in range(3)
    ]
    session = [rules.decide(facts(f"s{i}", input_ids=PROMPT[i:], session="s")) for i in range(3)]
    turns = [rules.decide(facts(f"t{i}", input_ids=PROMPT[: 20 + i])) for i in range(3)]
    groups = [{d.conversation for d in group} for group in (named, session, turns)]
    assert [len(group) for group in groups] == [1, 1, 1]
    assert len(set.union(*groups)) == 3


def test_another_key_gives_other_names() -> None:
    other = Admitter(b"other", sample_rate=1.0, min_tokens=2, max_tokens=100)
    assert other.decide(facts()).conversation != admitter().decide(facts()).conversation


def test_conversations_fall_into_the_splits_in_their_fixed_shares() -> None:
    rules = admitter()
    count = Counter(rules.decide(facts(f"r{i}", input_ids=(i, i + 1))).split for i in range(6000))
    assert 0.085 < count[Split.GATE] / 6000 < 0.115
    assert 0.04 < count[Split.SELECTION] / 6000 < 0.06


@pytest.mark.parametrize(("name", "kept"), [("code/python", "code/python"), ("my slice: secret text", None), (7, None)])
def test_a_slice_is_kept_only_as_a_short_plain_word(name: Any, kept: str | None) -> None:
    assert admitter().decide(facts(custom_params={"tide": {"slice": name}})).slice == kept


def test_length_buckets_have_closed_upper_ends() -> None:
    assert [length_bucket(n) for n in (1, 256, 257, 16384, 16385)] == ["le256", "le256", "le1024", "le16384", "gt16384"]
