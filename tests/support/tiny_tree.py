"""Tree drafting and its verification by plain loops, for tests: float64, one anchor, everything recomputed.

Written from SGLang's draft loop (``select_top_k_tokens``, ``organize_draft_results``, the draft's cache by place).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tests.support.tiny import last_row, norm


@dataclass(frozen=True)
class Candidate:
    """A proposal: its token, its parent's number (-1: the root) and the product of probabilities down to it."""

    token: int
    parent: int
    score: float


def propose_tree(
    tensors: Mapping[str, torch.Tensor],
    embedding: torch.Tensor,
    aux: torch.Tensor,
    ids: Sequence[int],
    anchor: int,
    *,
    steps: int,
    topk: int,
) -> list[Candidate]:
    """Every candidate that the draft loop offers, by number."""
    weights = {name: t.double() for name, t in tensors.items() if t.is_floating_point()}
    table, d2t = embedding.double(), tensors["d2t"]
    rows = [(weights["fc.weight"] @ aux[i].double(), ids[i + 1]) for i in range(anchor + 1)]

    def run(seen: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, list[tuple[float, int]]]:
        tokens = torch.tensor([token for _, token in seen])
        out = last_row(weights, torch.stack([hidden for hidden, _ in seen]), table[tokens])
        shares = (weights["lm_head.weight"] @ norm(out, weights["norm.weight"])).softmax(-1)
        return out, [(float(shares[i]), int(i + d2t[i])) for i in shares.argsort(descending=True)[:topk]]

    out, best = run(rows)
    found = [Candidate(token, -1, share) for share, token in best]
    beams = [(number, out) for number in range(topk)]  # which candidate, and the hidden state it goes on from
    places: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(topk)]
    for _ in range(1, steps):
        first, outs = len(found), []
        for place, (number, hidden) in zip(places, beams, strict=True):
            place.append((hidden, found[number].token))
            out, best = run([*rows, *place])
            outs.append(out)
            found += [Candidate(token, number, found[number].score * share) for share, token in best]
        order = sorted(range(first, len(found)), key=lambda number: -found[number].score)
        beams = [(number, outs[(number - first) // topk]) for number in order[:topk]]
    return found


def verify(candidates: Sequence[Candidate], draft_tokens: int, wanted: Sequence[int]) -> int:
    """How many of the wanted tokens a greedy walk down the kept candidates accepts."""
    order = sorted(range(len(candidates)), key=lambda number: -candidates[number].score)
    kept, at, accepted = set(order[: draft_tokens - 1]), -1, 0
    for token in wanted:
        children = [n for n in kept if candidates[n].parent == at and candidates[n].token == token]
        if not children:
            break
        at, accepted = children[0], accepted + 1
    return accepted
