"""A second SGLang plugin, for tests only: a draft that really accepts, and captured rows before they become bfloat16.

Put this folder on PYTHONPATH and the engine loads it (its dist-info is beside it); inert without its variables:

    TIDE_TEST_ORACLE=1        bias the draft's logits towards the token most often seen after a token; learns from every
                              finished answer, so that a second run of the same prompts accepts most drafts
    TIDE_TEST_SEQUENCES=FILE  the same, towards what follows in a JSON list of token id lists, from the first run on
    TIDE_TEST_SECOND_BEST=1   after odd ids the right token is only second best: trees have to branch
    TIDE_TEST_DUMP=FOLDER     every request handed to the spool, in the target's own dtype
    TIDE_TEST_FAULT=FILE      while FILE exists, the tap's copying of rows raises
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_BIAS = 50.0
Follows = Callable[[int, int], int]
"""Token that follows a token, by its place and its id; -1 when it is not known."""


class Learnt:
    """Of every finished answer, which token followed which."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def learn(self, _result: None, _streamer: Any, reqs: Any, *_args: Any, **_kwargs: Any) -> None:
        """AFTER SchedulerOutputStreamer.stream_output."""
        for req in reqs:
            if req.finished():
                for token, following in itertools.pairwise([req.origin_input_ids[-1], *req.output_ids_through_stop]):
                    self._seen[token][following] += 1

    def follows(self, _place: int, token: int) -> int:
        """See Follows."""
        return self._seen[token].most_common(1)[0][0] if token in self._seen else -1


class Given:
    """Sequences known from the start, told apart by the place and the id of a token."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._next = {(i, s[i]): s[i + 1] for s in sequences for i in range(len(s) - 1)}

    def follows(self, place: int, token: int) -> int:
        """See Follows. A draft reads each token one place early, beside the hidden state of the token before it."""
        return self._next.get((place + 1, token), self._next.get((place, token), -1))


class Oracle:
    """Biases the draft's logits in place."""

    def __init__(self, follows: Follows, *, branch: bool) -> None:
        self._follows, self._branch = follows, branch
        self._slots: dict[int, int] | None = None

    def __call__(self, result: Any, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """AFTER ModelRunner.forward."""
        if not runner.is_draft_worker:
            return
        logits = result.logits_output.next_token_logits
        if logits is None or logits.shape[0] == 0:
            return
        if self._slots is None:
            self._slots = {int(token): slot for slot, token in enumerate(runner.model.hot_token_id.tolist())}
        ids, places = batch.input_ids, batch.positions
        if ids.shape[0] != logits.shape[0]:
            last = torch.cumsum(batch.extend_seq_lens, 0) - 1
            ids, places = ids[last], places[last]
        for row, (token, place) in enumerate(zip(ids.tolist(), places.tolist(), strict=True)):
            slot = self._slots.get(self._follows(place, token))
            if slot is not None:
                logits[row, slot] += _BIAS
                if self._branch and token % 2:
                    logits[row, (slot + 1) % logits.shape[1]] += _BIAS + 3


def dump(_spool: Any, states: Any, _split: Any) -> None:
    """Write a request's rows before they are rounded."""
    from safetensors.torch import save_file

    folder = Path(os.environ["TIDE_TEST_DUMP"])
    tensors = {
        "ids": torch.cat([states.input_ids, torch.tensor([states.last_token], dtype=torch.int32)]),
        "aux": states.aux_hidden,
        "last": states.last_hidden,
        "first_row": torch.tensor(states.first_row),
        "prompt_len": torch.tensor(states.prompt_len),
    }
    temporary = folder / f".{states.info.request}"
    save_file(tensors, temporary)
    temporary.replace(folder / f"{states.info.request}.safetensors")


def fail_if_asked(*_args: Any, **_kwargs: Any) -> None:
    """A bug inside the tap, there while the file exists."""
    if Path(os.environ["TIDE_TEST_FAULT"]).exists():
        raise RuntimeError("a fault made by a test")


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    follows: Follows | None = None
    if os.environ.get("TIDE_TEST_ORACLE"):
        learnt = Learnt()
        stream = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
        HookRegistry.register(stream, learnt.learn, HookType.AFTER)
        follows = learnt.follows
    elif file := os.environ.get("TIDE_TEST_SEQUENCES"):
        follows = Given(json.loads(Path(file).read_text())).follows
    if follows is not None:
        oracle = Oracle(follows, branch=os.environ.get("TIDE_TEST_SECOND_BEST") == "1")
        HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", oracle, HookType.AFTER)
    if os.environ.get("TIDE_TEST_DUMP"):
        HookRegistry.register("tide.sglang_plugin.spool.Spool.put", dump, HookType.BEFORE)
    if os.environ.get("TIDE_TEST_FAULT"):
        HookRegistry.register("tide.sglang_plugin.tap.fill", fail_if_asked, HookType.BEFORE)
