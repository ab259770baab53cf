"""An SGLang plugin for tests only: the draft knows how given sequences go on, so that its tokens are really accepted.

Put this folder on PYTHONPATH and the engine loads it (its dist-info is beside it); inert without its variables:

    TIDE_TEST_SEQUENCES=FILE  JSON list of token id lists; the draft's logits are biased towards the token that followed
    TIDE_TEST_SECOND_BEST=1   after odd ids the right token is only second best: trees have to branch
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

_BIAS = 50.0


class Oracle:
    """Biases the draft's logits in place. Sequences are told apart by the place and the id of the last token."""

    def __init__(self, sequences: list[list[int]], *, branch: bool) -> None:
        self._next = {(i, s[i]): s[i + 1] for s in sequences for i in range(len(s) - 1)}
        self._branch = branch
        self._slots: dict[int, int] | None = None

    def __call__(self, result: Any, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """AFTER ModelRunner.forward."""
        if not runner.is_draft_worker:
            return
        logits = result.logits_output.next_token_logits
        if logits is None or logits.shape[0] == 0:
            return
        if self._slots is None:
            self._slots = {token: slot for slot, token in enumerate(runner.model.hot_token_id.tolist())}
        ids, places = batch.input_ids, batch.positions
        if ids.shape[0] != logits.shape[0]:
            last = torch.cumsum(batch.extend_seq_lens, 0) - 1
            ids, places = ids[last], places[last]
        for row, (token, place) in enumerate(zip(ids.tolist(), places.tolist(), strict=True)):
            # A draft reads each token one place early, beside the hidden state of the token before it.
            follows = self._next.get((place + 1, token), self._next.get((place, token), -1))
            slot = self._slots.get(follows)
            if slot is not None:
                logits[row, slot] += _BIAS
                if self._branch and token % 2:
                    logits[row, (slot + 1) % logits.shape[1]] += _BIAS + 3


def register() -> None:
    """Called by SGLang in each of its processes."""
    file = os.environ.get("TIDE_TEST_SEQUENCES")
    if not file:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    oracle = Oracle(json.loads(Path(file).read_text()), branch=os.environ.get("TIDE_TEST_SECOND_BEST") == "1")
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", oracle, HookType.AFTER)
