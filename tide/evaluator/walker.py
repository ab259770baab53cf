"""Many requests walked at once: in every round each takes its next verify step, so that their drafting is one batch.

Owns which requests are open together, and the memory that takes. Knows nothing of shards, splits or reports; what a
verify step does to a walk is in ``acceptance``, what it looks at in ``tree``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tide.acceptance import Replay, Walk
from tide.domain import ShardRequest
from tide.evaluator.draft_module import Eagle3Draft, Prefix
from tide.evaluator.drafting import Beams
from tide.evaluator.target import SampledTarget
from tide.evaluator.tree import Tree, TreeShape, draft_chain, draft_tree, follow
from tide.shards import RequestStates

MAX_REQUESTS = 256
"""Requests open at once; more make the matrix products no faster."""
MAX_ROWS = 65_536
"""Rows held at once: the next request waits, one alone may be longer."""
MAX_SCORES = 8_000_000
"""Attention scores held at once (float32), padding included."""


@dataclass(frozen=True)
class OpenRequest:
    """A request on its walk."""

    info: ShardRequest
    prompt_tokens: int
    ids: list[int]
    """[rows + 1] the token behind the last row included."""
    first: int
    """Row that predicted the first generated token."""
    prefix: Prefix
    last_hidden: torch.Tensor
    """[rows, H]; no row at temperature 0."""
    replay: Replay

    @property
    def anchor(self) -> int:
        """Row that is drafted from next: the one before the newest known token."""
        return self.first + self.replay.position

    def wanted(self, steps: int) -> list[int]:
        """[steps] the tokens behind the newest known one; -1 where none is known."""
        known = self.ids[self.anchor + 2 : self.anchor + 2 + steps]
        return known + [-1] * (steps - len(known))


class Walker:
    """Walks requests with one draft.

    Args:
        draft: the module.
        shape: what a verify step looks at.
        target: what sampling draws from; None: verification is greedy.
    """

    def __init__(self, draft: Eagle3Draft, shape: TreeShape, target: SampledTarget | None = None) -> None:
        self._draft, self._shape, self._target = draft, shape, target

    def walk(self, requests: Iterable[RequestStates]) -> Iterator[tuple[OpenRequest, Walk]]:
        """Every request and its walk, in the order in which they end."""
        waiting = map(self._open, requests)
        following, active = next(waiting, None), []
        while active or following is not None:
            while following is not None and self._fits(active, following):
                active.append(following)
                following = next(waiting, None)
            done = [request for request in active if not request.replay.left]
            active = [request for request in active if request.replay.left]
            for request in done:
                yield request, request.replay.expected() if self._target else request.replay.counted()
            if active:
                self._round(active)

    def _open(self, states: RequestStates) -> OpenRequest:
        ids = [*states.input_ids.tolist(), states.last_token]
        first = max(states.prompt_len - 1 - states.first_row, 0)
        usable = max(states.rows - 1, 0)  # behind the newest token of the last row nothing is left to propose
        return OpenRequest(
            info=states.info,
            prompt_tokens=states.prompt_len,
            ids=ids,
            first=first,
            prefix=self._draft.prefix(states.aux_hidden[:usable], torch.tensor(ids[1 : usable + 1]), first),
            last_hidden=states.last_hidden if self._target else states.last_hidden[:0].clone(),
            replay=Replay(max(states.rows - first, 1), self._shape.steps),
        )

    def _fits(self, active: Sequence[OpenRequest], other: OpenRequest) -> bool:
        rows = [len(request.ids) for request in (*active, other)]
        scores = len(rows) * max(rows) * self._draft.contract.num_attention_heads * self._shape.topk
        return not active or (len(rows) <= MAX_REQUESTS and sum(rows) <= MAX_ROWS and scores <= MAX_SCORES)

    def _round(self, active: Sequence[OpenRequest]) -> None:
        """One verify step of each."""
        wanted = torch.tensor([request.wanted(self._shape.steps) for request in active])
        beams = Beams(self._draft, [r.prefix for r in active], [r.anchor for r in active])
        if self._shape.topk == 1:
            tree = draft_chain(beams, self._draft.target_ids, self._shape, wanted)
        else:
            tree = draft_tree(beams, self._draft.target_ids, self._shape)
        accepted, offered = follow(tree, self._shape, wanted)
        expected = self._expected(active, tree, offered, wanted)
        for request, right, shares in zip(active, accepted.tolist(), expected, strict=True):
            request.replay.step(right, shares)

    def _expected(
        self, active: Sequence[OpenRequest], tree: Tree, offered: torch.Tensor, wanted: torch.Tensor
    ) -> list[list[float]]:
        """[a, steps] chance that verification accepts a proposal at each depth of the path; empty when it is greedy."""
        if self._target is None:
            return [[] for _ in active]
        found = torch.zeros(wanted.shape)
        for depth in range(self._shape.steps):
            block = self._shape.block(depth)
            open_here = offered[:, block] & (wanted[:, depth] >= 0)[:, None]
            rows = open_here.any(-1).nonzero().flatten()
            if len(rows):
                hidden = [active[row].last_hidden[active[row].anchor + 1 + depth] for row in rows.tolist()]
                found[rows, depth] = self._target.chances(
                    torch.stack(hidden), tree.tokens[rows, block], open_here[rows]
                )
        shares: list[list[float]] = found.tolist()
        return shares
