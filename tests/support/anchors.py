"""Chain drafting at EVERY anchor of a request, and the walk over what came out: the definition, without the batching.

Tests hold the evaluator against it, and it against other implementations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.drafting import Anchors, Beams
from tide.states.shards import RequestStates


def right_proposals(draft: Eagle3Draft, states: RequestStates, steps: int) -> list[int]:
    """[G - 1] leading right proposals when the newest known token is generated token i."""
    ids = [*states.input_ids.tolist(), states.last_token]
    anchors = list(range(max(states.prompt_len - 1 - states.first_row, 0), states.rows - 1))
    if not anchors:
        return []
    prefix = draft.prefix(states.aux_hidden[:-1], torch.tensor(ids[1:-1]))
    beams, chains = Beams(draft, [Anchors(prefix, torch.tensor(anchors))]), []
    for depth in range(steps):
        chains.append(draft.target_ids[beams.logits()[:, 0].argmax(-1)])
        if depth + 1 < steps:
            beams.advance(chains[-1][:, None])
    proposed = torch.stack(chains, dim=1).tolist()
    return [leading(chain, ids[anchor + 2 :]) for anchor, chain in zip(anchors, proposed, strict=True)]


def leading(proposed: Sequence[int], wanted: Sequence[int]) -> int:
    """How many leading proposals are right."""
    right = [a == b for a, b in zip(proposed, wanted, strict=False)]
    return [*right, False].index(False)


def walk(correct: Sequence[int]) -> tuple[int, int, int]:
    """(tokens, verify steps, accepted) of a request with these leading right proposals."""
    position, steps, accepted = 0, 0, 0
    while position < len(correct):
        right = int(correct[position])
        steps, accepted, position = steps + 1, accepted + right, position + right + 1
    return len(correct) + 1, steps, accepted
