"""Many requests walked at once, so that their drafting is one batch.

Owns which requests are open together and which of their anchors are drafted. Knows nothing of shards, splits or
reports; what a verify step does to a walk is in ``acceptance``, what it looks at in ``tree``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tide.acceptance import Replay, Walk
from tide.domain import ShardRequest
from tide.evaluator.draft_module import Eagle3Draft, Prefix
from tide.evaluator.drafting import Anchors, Beams
from tide.evaluator.target import SampledTarget
from tide.evaluator.tree import Tree, TreeShape, draft_chain, draft_tree, follow
from tide.states.shards import RequestStates

MAX_ROWS = 8192
"""Rows held at once, one request more at most: their keys, values and hidden states."""


@dataclass(frozen=True)
class OpenRequest:
    """A request on its walk."""

    info: ShardRequest
    prompt_tokens: int
    ids: list[int]
    """[rows + 1] the token behind the last row included."""
    first: int
    """Row that predicted the first generated token: the anchor while that is the newest known one."""
    prefix: Prefix
    last_hidden: torch.Tensor
    """[rows, H]; no row at temperature 0."""
    replay: Replay

    def wanted(self, position: int, steps: int) -> list[int]:
        """[steps] the tokens behind generated token ``position``; -1 where none is known."""
        start = self.first + position + 2
        known = self.ids[start : start + steps]
        return known + [-1] * (steps - len(known))


@dataclass(frozen=True)
class Visit:
    """A verify step: of a request, at a generated token, and its row in the drafted batch."""

    request: OpenRequest
    position: int
    row: int


class Walker:
    """Walks requests with one draft.

    A chain is drafted at every anchor of a request at once, as its steps cost little and mostly end with the first; a
    tree only where the walk comes by, one verify step of every open request after the other.

    Args:
        draft: the module.
        shape: what a verify step looks at.
        target: what sampling draws from; None: verification is greedy.
    """

    def __init__(self, draft: Eagle3Draft, shape: TreeShape, target: SampledTarget | None = None) -> None:
        self._draft, self._shape, self._target = draft, shape, target

    def walk(self, requests: Iterable[RequestStates]) -> Iterator[tuple[OpenRequest, Walk]]:
        """Every request and its walk, in order."""
        batch: list[OpenRequest] = []
        for states in requests:
            batch.append(self._open(states))
            if sum(len(request.ids) for request in batch) >= MAX_ROWS:
                yield from self._walked(batch)
                batch = []
        yield from self._walked(batch)

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

    def _walked(self, batch: Sequence[OpenRequest]) -> Iterator[tuple[OpenRequest, Walk]]:
        while active := [request for request in batch if request.replay.left]:
            self._round(active)
        for request in batch:
            yield request, request.replay.expected() if self._target else request.replay.counted()

    def _round(self, active: Sequence[OpenRequest]) -> None:
        """All verify steps that one batch of drafting settles."""
        chains = self._shape.topk == 1
        places = [range(r.replay.position, r.replay.position + (r.replay.left if chains else 1)) for r in active]
        each = list(zip(active, places, strict=True))
        wanted = torch.tensor([r.wanted(position, self._shape.steps) for r, span in each for position in span])
        beams = Beams(self._draft, [Anchors(r.prefix, torch.tensor(span) + r.first) for r, span in each])
        tree = (
            draft_chain(beams, self._draft.target_ids, self._shape, wanted)
            if chains
            else draft_tree(beams, self._draft.target_ids, self._shape)
        )
        accepted, offered = follow(tree, self._shape, wanted)
        right = accepted.tolist()
        visits = _visits(each, right)
        for visit, shares in zip(visits, self._chances(visits, tree, offered, wanted), strict=True):
            visit.request.replay.step(right[visit.row], shares)

    def _chances(
        self, visits: Sequence[Visit], tree: Tree, offered: torch.Tensor, wanted: torch.Tensor
    ) -> list[list[float]]:
        """[visits, steps] chance that verification accepts a proposal, by depth; empty ones when it is greedy."""
        if self._target is None:
            return [[] for _ in visits]
        rows = torch.tensor([visit.row for visit in visits])
        found = torch.zeros((len(visits), self._shape.steps))
        for depth in range(self._shape.steps):
            block = self._shape.block(depth)
            here = offered[rows, block] & (wanted[rows, depth] >= 0)[:, None]
            some = here.any(-1).nonzero().flatten()
            if len(some):
                hidden = torch.stack([_hidden(visits[index], depth) for index in some.tolist()])
                found[some, depth] = self._target.chances(hidden, tree.tokens[rows[some], block], here[some])
        shares: list[list[float]] = found.tolist()
        return shares


def _visits(each: Sequence[tuple[OpenRequest, range]], right: Sequence[int]) -> list[Visit]:
    """Where each request's walk comes by, of the places that were drafted."""
    found, start = [], 0
    for request, span in each:
        place = 0
        while place < len(span):
            found.append(Visit(request, span[place], start + place))
            place += right[start + place] + 1
        start += len(span)
    return found


def _hidden(visit: Visit, depth: int) -> torch.Tensor:
    """[H] the logged state that the token at this depth was drawn from."""
    return visit.request.last_hidden[visit.request.first + visit.position + 1 + depth]
