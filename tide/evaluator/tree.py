"""The tree of proposals that one verify step looks at, as SGLang grows it, and the path of logged tokens through it.

Owns the shape, the growing and the following of trees; a chain is the tree of topk 1. Knows nothing of the draft's
forward pass, of requests or of scores.

After SGLang 0.5.23, ``speculative/spec_utils.select_top_k_tokens`` and ``eagle_utils.organize_draft_results``. Each of
the topk beams offers its topk likeliest tokens, scored by the product of their probabilities along the path; the topk
best of all go on as beams; of everything ever offered the draft_tokens - 1 best are verified. Candidates are numbered
as they were offered: topk at the first depth, topk * topk at each later one. A probability is never above 1, so an
ancestor never scores below its descendant; where they tie and only the descendant is kept, verification cannot reach
it, here as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tide.errors import EvaluationError


class Source(Protocol):
    """What proposes: ``drafting.Beams``."""

    def logits(self) -> torch.Tensor:
        """[a, beams, DV]."""

    def best(self) -> torch.Tensor:
        """[a] draft id that the first beam finds likeliest."""

    def keep(self, alive: torch.Tensor) -> None:
        """Go on with some anchors only."""

    def advance(self, ids: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """One step deeper."""


@dataclass(frozen=True)
class TreeShape:
    """What a verify step looks at, as the server is configured."""

    steps: int
    topk: int
    draft_tokens: int
    """Tokens of a verify step, the newest known one included."""

    @classmethod
    def of(cls, steps: int, topk: int, draft_tokens: int | None, vocabulary: int) -> TreeShape:
        """A shape that SGLang would serve.

        Args:
            vocabulary: size of the draft's own.

        Raises:
            EvaluationError: names the field.
        """
        if steps < 1:
            raise EvaluationError(f"steps is {steps}; a draft takes at least 1 step")
        if not 1 <= topk <= vocabulary:
            raise EvaluationError(
                f"topk is {topk}; at least 1, and at most the {vocabulary} tokens that the draft knows"
            )
        most = topk + (steps - 1) * topk * topk + 1
        least = steps + 1 if topk == 1 else 2
        if draft_tokens is None and topk > 1:
            raise EvaluationError(
                f"draft_tokens is not given; for a tree (topk {topk}) say what serves, {least} to {most}"
            )
        shape = cls(steps, topk, most if draft_tokens is None else draft_tokens)
        if not least <= shape.draft_tokens <= most:
            raise EvaluationError(
                f"draft_tokens is {draft_tokens}; {steps} steps with topk {topk} make {least} to {most}"
            )
        return shape

    def block(self, depth: int) -> slice:
        """The candidates of one depth, from 0."""
        if depth == 0:
            return slice(0, self.topk)
        start = self.topk + (depth - 1) * self.topk**2
        return slice(start, start + self.topk**2)


@dataclass(frozen=True)
class Tree:
    """The candidates of each of a anchors."""

    tokens: torch.Tensor
    """[a, candidates] int64 target ids; -1 where none was drafted."""
    parents: torch.Tensor
    """[a, candidates] int64 number of the candidate before it, -1 at the first depth."""
    kept: torch.Tensor
    """[a, candidates] bool: verified."""


def draft_tree(source: Source, target_ids: torch.Tensor, shape: TreeShape) -> Tree:
    """Grow the whole tree of each anchor.

    Args:
        source: at its anchors.
        target_ids: [DV] target id of each draft id.
        shape: of topk above 1; it works for 1 too.
    """
    topk = shape.topk
    scores, index = source.logits()[:, 0].softmax(-1).topk(topk)
    ids, numbers = target_ids[index], torch.arange(topk).expand(len(scores), -1)
    offered, tokens, parents = [scores], [ids], [torch.full_like(ids, -1)]
    beam = torch.zeros_like(ids)
    for depth in range(1, shape.steps):
        source.advance(ids, beam)
        share, index = source.logits().softmax(-1).topk(topk)
        offered.append((scores[..., None] * share).flatten(1))
        tokens.append(target_ids[index].flatten(1))
        parents.append(numbers.repeat_interleave(topk, dim=1))
        scores, best = offered[-1].topk(topk)
        ids, beam, numbers = tokens[-1].gather(1, best), best // topk, best + shape.block(depth).start
    every = torch.cat(offered, dim=1)
    kept = torch.zeros_like(every, dtype=torch.bool).scatter_(1, every.topk(shape.draft_tokens - 1).indices, True)
    return Tree(torch.cat(tokens, dim=1), torch.cat(parents, dim=1), kept)


def draft_chain(source: Source, target_ids: torch.Tensor, shape: TreeShape, wanted: torch.Tensor) -> Tree:
    """Each anchor's likeliest token, step by step, up to the first that is not the wanted one: none behind it counts.

    Args:
        source, target_ids: as in ``draft_tree``.
        wanted: [a, steps] the logged tokens; -1 where none is known.
    """
    tokens, rows = torch.full_like(wanted, -1), torch.arange(len(wanted))
    for depth in range(shape.steps):
        ids = target_ids[source.best()]
        tokens[rows, depth] = ids
        if depth + 1 == shape.steps:
            break
        alive = (ids == wanted[rows, depth]) & (wanted[rows, depth + 1] >= 0)
        if not bool(alive.any()):
            break
        rows = rows[alive]
        source.keep(alive)
        source.advance(ids[alive][:, None])
    return Tree(tokens, torch.arange(-1, shape.steps - 1).expand_as(tokens), tokens >= 0)


def follow(tree: Tree, shape: TreeShape, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest path from the root that equals the logged tokens; it is what verification accepts.

    Args:
        wanted: [a, steps] the logged tokens behind each anchor's newest one; -1 where none is known.

    Returns:
        accepted: [a] int64 tokens of the path.
        offered: [a, candidates] bool: what verification compares with the tokens of the path and the one behind it.
    """
    at, accepted = torch.full((len(wanted),), -1), torch.zeros(len(wanted), dtype=torch.int64)
    alive, offered = torch.ones(len(wanted), dtype=torch.bool), []
    for depth in range(shape.steps):
        block = shape.block(depth)
        offered.append(tree.kept[:, block] & (tree.parents[:, block] == at[:, None]) & alive[:, None])
        hit = offered[-1] & (tree.tokens[:, block] == wanted[:, depth, None])
        alive = hit.any(-1)
        accepted += alive
        at = torch.where(alive, block.start + hit.int().argmax(-1), at)
    return accepted, torch.cat(offered, dim=1)
