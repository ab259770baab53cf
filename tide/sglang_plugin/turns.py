"""Finds the first user turn of a prompt in its token ids: what identifies a conversation across its turns.

Owns the reading of a chat template through the tokenizer that renders it. A prompt that no template made (plain
completion) has no turns: the whole prompt identifies it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

logger = logging.getLogger("tide.capture")

_MARK = "tideturn"


class FirstTurn:
    """Cuts token ids to everything through the end of the first user turn.

    Args:
        end: id of the token that ends a turn.
        head: ids before the user's text when the client sends no system message.
        ends: how many turns end through the first user turn, without and with a system message of the client's.
    """

    def __init__(self, end: int, head: Sequence[int], ends: tuple[int, int]) -> None:
        self._end, self._head, self._ends = end, tuple(head), ends

    def __call__(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids through the first user turn; all of them when there is no such turn."""
        plain = tuple(ids[: len(self._head)]) == self._head
        wanted = self._ends[0] if plain else self._ends[1]
        ends = np.flatnonzero(np.asarray(ids) == self._end)
        return ids[: int(ends[wanted - 1]) + 1] if len(ends) >= wanted else ids

    @classmethod
    def of(cls, tokenizer: Any) -> FirstTurn | None:
        """Learn a tokenizer's template by rendering it; None when there is no template or it cannot be read."""
        user, system = {"role": "user", "content": _MARK}, {"role": "system", "content": "x"}
        try:
            before, after = _render(tokenizer, [user]).split(_MARK)
            special = set(tokenizer.all_special_ids)
            end = next(i for i in tokenizer.encode(after, add_special_tokens=False) if i in special)
            head = tokenizer.encode(before, add_special_tokens=False)
            plain = head.count(end) + 1
            try:
                with_system = _render(tokenizer, [system, user]).split(_MARK)[0]
                ends = tokenizer.encode(with_system, add_special_tokens=False).count(end) + 1
            except Exception:  # noqa: BLE001  templates raise whatever they like when they take no system message
                ends = plain
            return cls(end, head, (plain, ends))
        # A template is a foreign program: any failure only means that whole prompts identify conversations.
        except Exception as error:  # noqa: BLE001
            logger.warning("tide: no chat template to read (%r); a conversation is known by its whole prompt", error)
            return None


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
