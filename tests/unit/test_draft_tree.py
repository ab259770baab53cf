"""Trees as SGLang grows and verifies them, on random logits: its loops written out, and its ops' CPU stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tide_sglang_cpu import tree as kernels

from tide.errors import EvaluationError
from tide.evaluator.tree import TreeShape, draft_chain, draft_tree, follow

VOCAB = 6
"""Few tokens: paths through the tree really occur."""
IDS = torch.tensor([3, 0, 5, 2, 9, 7])
"""Target ids of the draft's own."""
SETTINGS = settings(max_examples=80, deadline=None)


@dataclass
class Logits:
    """A draft whose logits are random, and what SGLang's loop makes of the same ones."""

    seed: int
    requests: int
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def logits(self) -> torch.Tensor:
        beams = self.given[-1][0].shape[1] if self.given else 1
        generator = torch.Generator().manual_seed(self.seed + len(self.given))
        return torch.randn((self.requests, beams, VOCAB), generator=generator) * 2

    def best(self) -> torch.Tensor:
        return self.logits()[:, 0].argmax(-1)

    def advance(self, ids: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        assert parents is not None
        self.given.append((ids, parents))

    def keep(self, alive: torch.Tensor) -> None:
        raise AssertionError("a tree is grown for all anchors")


def sglang_draft(source: Logits, shape: TreeShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(parent_list, selected_index, draft tokens): ``draft_forward`` of SGLang 0.5.23, transcribed."""
    k, scores, tops, tokens, parents = shape.topk, torch.empty(0), [], [], []
    p, index = source.logits()[:, 0].softmax(-1).topk(k)
    for i in range(shape.steps):
        ids = IDS[index]
        if i == 0:
            input_ids, beam, scores = ids, torch.zeros_like(ids), p
            tops.append(p)
            tokens.append(ids)
            parents.append(torch.arange(-1, k).expand(len(p), -1))
        else:
            expanded = scores[:, :, None] * p
            scores, best = expanded.flatten(1).topk(k)
            input_ids, beam = ids.flatten(1).gather(1, best), best // k
            tops.append(expanded.flatten(1))
            tokens.append(ids.flatten(1))
            parents.append(best + (k * k * (i - 1) + k))
        if i + 1 < shape.steps:
            source.advance(input_ids, beam)
            p, index = source.logits().softmax(-1).topk(k)
    selected = torch.cat(tops, 1).topk(shape.draft_tokens - 1).indices.sort().values
    listed = torch.cat(parents[:-1], 1) if len(parents) > 1 else torch.empty((len(p), 0), dtype=torch.int64)
    return listed, selected, torch.cat(tokens, 1).gather(1, selected)


def verified(
    shape: TreeShape, drafted: tuple[torch.Tensor, torch.Tensor, torch.Tensor], wanted: torch.Tensor
) -> list[int]:
    """Accepted tokens by the kernels' tree build and greedy walk, when the target goes on as ``wanted`` says."""
    parents, selected, tokens = drafted
    size, n = len(selected), shape.draft_tokens
    mask, positions = torch.ones(size * n * n, dtype=torch.bool), torch.empty(size * n, dtype=torch.int64)
    index, child, sibling = (torch.full((size, n), -1) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        parents, selected, torch.full((size,), 5), mask, positions, index, child, sibling,
        shape.topk, shape.steps, n, kernels.QLEN_ONLY,
    )  # fmt: skip
    level = positions.view(size, n) - 5
    target = torch.cat([wanted, torch.full((size, 1), -2)], 1).gather(1, level)  # on the logged path: by depth alone
    predicts, count = torch.zeros(size * n, dtype=torch.int32), torch.empty(size, dtype=torch.int32)
    accepted = torch.full((size, shape.steps + 1), -1, dtype=torch.int32)
    candidates = torch.cat([torch.full((size, 1), -3), tokens], 1)
    kernels.verify_tree_greedy_cpu(predicts, accepted, count, candidates, index, child, sibling, target.flatten())
    found: list[int] = count.tolist()
    return found


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    steps, topk = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return TreeShape(steps, topk, draw(st.integers(2, topk + (steps - 1) * topk * topk + 1)))


@SETTINGS
@given(shapes(), st.integers(0, 10**6), st.data())
def test_a_tree_is_grown_and_accepted_as_sglang_does(shape: TreeShape, seed: int, data: st.DataObject) -> None:
    theirs = sglang_draft(first := Logits(seed, 6), shape)
    ours = draft_tree(second := Logits(seed, 6), IDS, shape)
    for (ids, beams), (expected_ids, expected_beams) in zip(second.given, first.given, strict=True):
        assert ids.tolist() == expected_ids.tolist()
        assert beams.tolist() == expected_beams.tolist()
    assert [row.nonzero().flatten().tolist() for row in ours.kept] == theirs[1].tolist()
    assert ours.tokens.gather(1, theirs[1]).tolist() == theirs[2].tolist()
    # The logged tokens follow some path of the tree for a while, so that walks go deep.
    wanted = IDS[torch.randint(0, VOCAB, (6, shape.steps), generator=torch.Generator().manual_seed(seed))]
    for row in range(6):
        path = data.draw(st.sampled_from(theirs[1][row].tolist()))
        while path >= 0:
            depth = next(d for d in range(shape.steps) if path in range(shape.block(d).start, shape.block(d).stop))
            wanted[row, depth] = ours.tokens[row, path]
            path = int(ours.parents[row, path])
    accepted, _ = follow(ours, shape, wanted)
    assert accepted.tolist() == verified(shape, theirs, wanted)
    assert accepted.max() >= 1


def test_walks_of_these_trees_go_deep() -> None:
    shape = TreeShape(4, 3, 12)
    tree = draft_tree(Logits(1, 400), IDS, shape)
    wanted = IDS[torch.randint(0, VOCAB, (400, 4), generator=torch.Generator().manual_seed(2))]
    accepted, _ = follow(tree, shape, wanted)
    assert set(accepted.tolist()) >= {0, 1, 2, 3}


def test_a_kept_candidate_whose_parent_tied_and_was_not_kept_is_out_of_reach() -> None:
    shape = TreeShape(2, 2, 2)
    tree = draft_tree(Certain(), IDS, shape)
    kept = tree.kept[0].nonzero().flatten().tolist()
    parents = torch.tensor([[-1, 0, 1]])
    selected = torch.tensor([kept])
    wanted = torch.tensor([[int(IDS[0]), int(IDS[0])]])
    expected = verified(shape, (parents, selected, tree.tokens[:, kept]), wanted)
    assert follow(tree, shape, wanted)[0].tolist() == expected


class Certain(Logits):
    """Every probability is 1 or 0: child and parent score the same."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def logits(self) -> torch.Tensor:
        beams = self.given[-1][0].shape[1] if self.given else 1
        return torch.tensor([0.0, *[-1e9] * (VOCAB - 1)]).expand(1, beams, -1)


def test_what_is_offered_are_the_children_met_along_the_logged_path() -> None:
    shape = TreeShape(3, 2, 9)
    tree = draft_tree(Logits(4, 50), IDS, shape)
    wanted = IDS[torch.randint(0, VOCAB, (50, 3), generator=torch.Generator().manual_seed(5))]
    accepted, offered = follow(tree, shape, wanted)
    for row in range(50):
        at, met = -1, []
        for depth in range(3):
            children = [
                n for n in range(10) if tree.kept[row, n] and tree.parents[row, n] == at and block_of(shape, n) == depth
            ]
            met += children
            at = next((n for n in children if tree.tokens[row, n] == wanted[row, depth]), -9)
        assert offered[row].nonzero().flatten().tolist() == met
    assert accepted.max() > 1


def block_of(shape: TreeShape, number: int) -> int:
    return next(d for d in range(shape.steps) if shape.block(d).start <= number < shape.block(d).stop)


class Alone(Logits):
    """A chain's draft: one beam, fewer anchors as they go wrong."""

    def __init__(self, seed: int, requests: int) -> None:
        super().__init__(seed, requests)
        self.rows = torch.arange(requests)
        self.depth, self.drafted = 0, 0

    def logits(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.depth)
        self.drafted += len(self.rows)
        return torch.randn((self.requests, 1, VOCAB), generator=generator)[self.rows]

    def advance(self, ids: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        self.depth += 1
        assert ids.shape == (len(self.rows), 1)

    def keep(self, alive: torch.Tensor) -> None:
        self.rows = self.rows[alive]


def test_a_chain_is_drafted_no_further_than_its_first_wrong_token() -> None:
    shape = TreeShape.of(3, 1, None, VOCAB)
    wanted = IDS[torch.randint(0, VOCAB, (200, 3), generator=torch.Generator().manual_seed(8))]
    wanted[:40, 1:] = -1  # the answer ends there
    tree = draft_chain(source := Alone(8, 200), IDS, shape, wanted)
    accepted, offered = follow(tree, shape, wanted)
    whole = torch.stack([IDS[Alone(8 + d, 200).logits()[:, 0].argmax(-1)] for d in range(3)], dim=1)
    right = (whole == wanted).int().cumprod(1).sum(1)
    assert accepted.tolist() == right.tolist()
    open_steps = [min(int(n) + 1, 1 if row < 40 else 3) for row, n in enumerate(right)]
    assert offered.sum(1).tolist() == open_steps
    assert source.drafted == sum(open_steps)
    assert set(accepted.tolist()) >= {0, 1, 2}


@pytest.mark.parametrize(
    ("steps", "topk", "draft_tokens", "message"),
    [
        (0, 1, None, "steps is 0"),
        (-1, 2, 4, "steps is -1"),
        (3, 0, None, "topk is 0"),
        (3, 25, 8, "topk is 25; at least 1, and at most the 24"),
        (3, 2, None, "draft_tokens is not given"),
        (3, 2, 1, "draft_tokens is 1; 3 steps with topk 2 make 2 to 11"),
        (3, 2, 12, "draft_tokens is 12; 3 steps with topk 2 make 2 to 11"),
        (3, 1, 5, "draft_tokens is 5; 3 steps with topk 1 make 4 to 4"),
        (3, 1, 3, "draft_tokens is 3"),
    ],
)
def test_a_shape_that_cannot_be_served_is_refused_by_its_field(
    steps: int, topk: int, draft_tokens: int | None, message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        TreeShape.of(steps, topk, draft_tokens, 24)


@pytest.mark.parametrize(("steps", "topk", "draft_tokens"), [(3, 2, 2), (3, 2, 11), (1, 4, 5), (3, 1, 4)])
def test_shapes_up_to_their_bounds_are_served(steps: int, topk: int, draft_tokens: int) -> None:
    assert TreeShape.of(steps, topk, draft_tokens, 24) == TreeShape(steps, topk, draft_tokens)
