"""Sketches and turns: small, the same everywhere, and without content."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tide.sglang_plugin.sketch import BUCKETS, pooled_state, script_of, token_sketch
from tide.sglang_plugin.turns import FirstTurn


def test_a_sketch_counts_every_token_and_depends_on_nothing_but_ids() -> None:
    ids = [5, 5, 7, 49151]
    sketch = token_sketch(ids)
    assert (len(sketch), sum(sketch)) == (BUCKETS, 4)
    assert sketch == token_sketch(list(reversed(ids)))
    assert token_sketch([]) == [0] * BUCKETS


def test_neighbouring_ids_spread_over_the_buckets() -> None:
    used = sum(count > 0 for count in token_sketch(range(BUCKETS)))
    assert used > 0.6 * BUCKETS


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello, world 123", "latin"),
        ("Привет, мир", "cyrillic"),
        ("你好世界 ok", "han"),
        ("안녕하세요", "hangul"),
        ("これはテストです", "kana"),
        ("123 + 4 = ?", "none"),
        ("", "none"),
    ],
)
def test_the_script_is_the_one_of_most_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def test_pooled_states_keep_distances_roughly_and_are_the_same_in_every_process() -> None:
    torch.manual_seed(0)
    near, far = torch.randn(10, 576), torch.randn(10, 576)
    same = torch.tensor(pooled_state(near)) - torch.tensor(pooled_state(near + 0.01))
    other = torch.tensor(pooled_state(near)) - torch.tensor(pooled_state(far))
    assert same.norm() < other.norm()
    assert pooled_state(torch.ones(1, 4))[:2] == pytest.approx([1.0003, 0.2973], abs=1e-3)


class ChatTokenizer:
    """A byte tokenizer with ChatML turns; 0 is the turn's end."""

    all_special_ids = (0,)

    def __init__(self, default_system: str) -> None:
        self._system = default_system

    def apply_chat_template(self, messages: list[dict[str, str]], **_kwargs: Any) -> str:
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return "".join(f"<{m['role']}>{m['content']}\0" for m in messages) + "<assistant>"

    def encode(self, text: str, **_kwargs: Any) -> list[int]:
        return list(text.encode())

    def prompt(self, *messages: tuple[str, str]) -> list[int]:
        return self.encode(self.apply_chat_template([{"role": r, "content": c} for r, c in messages]))


@pytest.mark.parametrize("default_system", ["", "be kind"])
@pytest.mark.parametrize("system", [(), (("system", "speak French"),)])
def test_turns_of_a_conversation_share_their_first_turn_and_other_ones_do_not(
    default_system: str, system: tuple[tuple[str, str], ...]
) -> None:
    tokenizer = ChatTokenizer(default_system)
    cut = FirstTurn.of(tokenizer)
    assert cut is not None
    first = cut(tokenizer.prompt(*system, ("user", "hi")))
    later = cut(tokenizer.prompt(*system, ("user", "hi"), ("assistant", "hello"), ("user", "more")))
    other = cut(tokenizer.prompt(*system, ("user", "ho"), ("assistant", "hello"), ("user", "more")))
    assert first == later
    assert first != other
    assert bytes(first).endswith(b"hi\0")


def test_a_prompt_without_turns_is_its_own_conversation() -> None:
    cut = FirstTurn.of(ChatTokenizer(""))
    assert cut is not None
    assert cut(list(b"once upon a time")) == list(b"once upon a time")


def test_a_tokenizer_without_a_template_is_no_obstacle() -> None:
    assert FirstTurn.of(object()) is None
