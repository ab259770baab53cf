"""A second SGLang plugin, for tests only: a draft that really accepts, and captured rows before they become bfloat16.

Put this folder on PYTHONPATH and the engine loads it (its dist-info is beside it); inert without its variables:

    TIDE_TEST_ORACLE=1      bias the draft's logits towards the token most often seen after a token; learns from every
                            finished answer, so that a second run of the same prompts accepts most drafts
    TIDE_TEST_ORACLE=2      the same, but after odd ids the right token is only second best: trees have to branch
    TIDE_TEST_DUMP=FOLDER   every request handed to the spool, in the target's own dtype
    TIDE_TEST_FAULT=FILE    while FILE exists, the tap's copying of rows raises
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

SEEN: defaultdict[int, Counter[int]] = defaultdict(Counter)
_BIAS = 50.0


def learn(_result: None, _streamer: Any, reqs: Any, *_args: Any, **_kwargs: Any) -> None:
    """Remember, of every finished answer, which token followed which."""
    for req in reqs:
        if req.finished():
            for token, following in itertools.pairwise([req.origin_input_ids[-1], *req.output_ids_through_stop]):
                SEEN[token][following] += 1


class Oracle:
    """Biases the draft's logits in place."""

    def __init__(self, *, branch: bool) -> None:
        self._branch = branch
        self._slots: dict[int, int] | None = None

    def __call__(self, result: Any, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        if not runner.is_draft_worker:
            return
        logits = result.logits_output.next_token_logits
        if logits is None or logits.shape[0] == 0:
            return
        if self._slots is None:
            self._slots = {int(token): slot for slot, token in enumerate(runner.model.hot_token_id.tolist())}
        ids = batch.input_ids
        if ids.shape[0] != logits.shape[0]:
            ids = ids[torch.cumsum(batch.extend_seq_lens, 0) - 1]
        for row, token in enumerate(ids.tolist()):
            likely = SEEN[token].most_common(1) if token in SEEN else []
            slot = self._slots.get(likely[0][0]) if likely else None
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
    """Called by SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if oracle := os.environ.get("TIDE_TEST_ORACLE"):
        stream = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
        HookRegistry.register(stream, learn, HookType.AFTER)
        forward = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
        HookRegistry.register(forward, Oracle(branch=oracle == "2"), HookType.AFTER)
    if os.environ.get("TIDE_TEST_DUMP"):
        HookRegistry.register("tide.sglang_plugin.spool.Spool.put", dump, HookType.BEFORE)
    if os.environ.get("TIDE_TEST_FAULT"):
        HookRegistry.register("tide.sglang_plugin.tap.fill", fail_if_asked, HookType.BEFORE)
