"""Whose states are captured: pure rules over what is known of a request before its first forward pass.

Owns opt-out, sampling, exclusions, and the identity of request, conversation and split. Knows nothing of SGLang and
never sees a row: a request that is refused here is never copied.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide.domain import PROBE_SLICE, Split, split_of

_SLICE = re.compile(r"^[A-Za-z0-9._:/-]{1,64}$")
_LENGTHS = (256, 1024, 4096, 16384)


@dataclass(frozen=True)
class RequestFacts:
    """What the scheduler knows when a request arrives."""

    rid: str
    input_ids: Sequence[int]
    custom_params: Any = None
    no_logs: Any = False
    session: str | None = None
    lora: bool = False
    multimodal: bool = False
    input_embeds: bool = False
    beam: bool = False
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Admission:
    """The decision on one request."""

    request: str
    """Keyed hash of the rid."""
    reason: str | None
    """Why no rows are captured; None: captured."""
    opted_out: bool
    conversation: str | None
    slice: str | None
    """As the client named it; None: made from script and length when the request ends."""
    split: Split | None

    @property
    def admitted(self) -> bool:
        """True when rows are captured."""
        return self.reason is None


class Admitter:
    """Decides on requests.

    Args:
        key: key of the hashes of requests and conversations.
        sample_rate: share of requests captured, by hash of the rid. May be changed while running.
        min_tokens, max_tokens: bounds on prompt + answer; a prompt above the upper one is refused here.
        turn: cuts a prompt to what identifies its conversation (the first user turn).
    """

    def __init__(self, key: bytes, *, sample_rate: float, min_tokens: int, max_tokens: int, turn: Any = None) -> None:
        self._key, self.sample_rate = key, sample_rate
        self._min, self._max, self._turn = min_tokens, max_tokens, turn or (lambda ids: ids)

    def decide(self, facts: RequestFacts) -> Admission:
        """Admit or refuse; an opted-out request gets no conversation, slice or split, a probe keeps its slice alone."""
        request, named = request_hash(self._key, facts.rid), tide_params(facts.custom_params)
        if opted_out(facts.no_logs, facts.custom_params):
            probe = PROBE_SLICE if named.get("slice") == PROBE_SLICE else None
            return Admission(request, "no_logs", True, None, probe, None)
        conversation = self._conversation(facts, named)
        return Admission(
            request=request,
            reason=self._refusal(facts),
            opted_out=False,
            conversation=conversation,
            slice=_slice_name(named.get("slice")),
            split=split_of(conversation),
        )

    def _refusal(self, facts: RequestFacts) -> str | None:
        longest = len(facts.input_ids) + (self._max if facts.max_new_tokens is None else facts.max_new_tokens)
        rules = (
            ("lora", facts.lora),
            ("multimodal", facts.multimodal),
            ("input_embeds", facts.input_embeds),
            ("beam", facts.beam),
            ("prefill_only", facts.max_new_tokens == 0),
            ("too_short", longest < self._min),
            ("too_long", len(facts.input_ids) > self._max),
            ("sampled_out", not self._sampled(facts.rid)),
        )
        return next((reason for reason, refused in rules if refused), None)

    def _sampled(self, rid: str) -> bool:
        if self.sample_rate >= 1.0:
            return True
        draw = int(self._hash(b"sample", rid.encode())[:13], 16) / 16**13
        return draw < self.sample_rate

    def _conversation(self, facts: RequestFacts, named: Mapping[str, Any]) -> str:
        if named.get("conversation") not in (None, ""):
            return conversation_hash(self._key, str(named["conversation"]))
        if facts.session:
            return session_hash(self._key, facts.session)
        return self._hash(b"first-turn", np.asarray(self._turn(facts.input_ids), dtype="<i8").tobytes())

    def _hash(self, kind: bytes, value: bytes) -> str:
        return _keyed(self._key, kind, value)


def request_hash(key: bytes, rid: str) -> str:
    """Name of a request everywhere outside the engine; a rid may be chosen by a client and never leaves it."""
    return _keyed(key, b"request", rid.encode())


def conversation_hash(key: bytes, name: str) -> str:
    """Name everywhere of a conversation that the client named; it decides the split."""
    return _keyed(key, b"named-conversation", name.encode())


def session_hash(key: bytes, session: str) -> str:
    """Name everywhere of a conversation that is known by its session."""
    return _keyed(key, b"session", session.encode())


def _keyed(key: bytes, kind: bytes, value: bytes) -> str:
    return hmac.new(key, kind + b"\0" + value, hashlib.sha256).hexdigest()[:32]


def opted_out(no_logs: Any, custom_params: Any) -> bool:
    """True when the client asked that nothing of the request be kept; a flag that cannot be read counts as set."""
    if no_logs is not False and no_logs is not None:
        return True
    if custom_params is None:
        return False
    if not isinstance(custom_params, Mapping):
        return True
    own = custom_params.get("tide")
    flags = [custom_params.get("no_logs")]
    if own is not None:
        if not isinstance(own, Mapping):
            return True
        flags.append(own.get("no_logs"))
    return any(flag is not None and flag is not False for flag in flags)


def tide_params(custom_params: Any) -> Mapping[str, Any]:
    """``custom_params.tide``, or nothing."""
    own = custom_params.get("tide") if isinstance(custom_params, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def length_bucket(prompt_tokens: int) -> str:
    """Name of a prompt length: ``le256`` ... ``gt16384``."""
    return next((f"le{top}" for top in _LENGTHS if prompt_tokens <= top), f"gt{_LENGTHS[-1]}")


def _slice_name(name: Any) -> str | None:
    """A slice as the client named it. Anything but a short plain word could carry content, so it is not kept."""
    return name if isinstance(name, str) and _SLICE.match(name) else None
