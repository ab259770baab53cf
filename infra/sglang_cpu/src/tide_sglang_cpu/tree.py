"""The draft tree: building it for verification, and the greedy walk that accepts a path of it.

Owns: the semantics of SGLang's `build_tree_kernel_efficient_cpu` and `verify_tree_greedy_cpu`. Does not know: KV slots,
attention, SGLang itself. Slots of a request's tree are 0 (the root: the last committed token) to n-1. Every function
writes into tensors its caller owns, through numpy views of the same memory.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FULL_MASK, QLEN_ONLY = 0, 1
ORPHAN = -1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Fill positions [B*n], the three link tables [B, n] and the visibility mask of each request's tree of n slots.

    `selected_index` [B, n-1] and `parent_list` [B, P] number the drafted candidates as the draft loop made them. The
    mask is n*n a request in mode QLEN_ONLY, n*(seq_len+n) in FULL_MASK, where the prefix columns are left as they are.
    """
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree_mask_mode {int(tree_mask_mode)} has no CPU stand-in in tide-sglang-cpu")
    n, lens = draft_token_num, verified_seq_len.numpy()
    size = len(lens)
    parents = _parents(parent_list.numpy(), selected_index.numpy(), topk)
    if n - 1 <= depth and (parents == np.arange(n - 1)).all():
        child, sibling, mask, level = _chain(n)
    else:
        child, sibling = _links(parents, n)
        mask, level = _ancestors(parents, n, depth)
    retrieve_index.numpy()[...] = np.arange(size * n).reshape(size, n)
    retrieve_next_token.numpy()[...] = child
    retrieve_next_sibling.numpy()[...] = sibling
    positions.numpy()[: size * n].reshape(size, n)[...] = lens[:, None] + level
    _write_mask(tree_mask.numpy(), np.broadcast_to(mask, (size, n, n)), lens, int(tree_mask_mode))


def _parents(parent_list: Any, selected: Any, topk: int) -> IntArray:
    """Slot of each drafted token's parent, [B, n-1]; ORPHAN where the parent was not selected."""
    group = selected // topk
    if not parent_list.size:
        return np.zeros_like(selected)
    wanted = np.take_along_axis(parent_list, group, axis=1)
    same = selected[:, None, :] == wanted[:, :, None]
    found = np.where(same.any(-1), same.argmax(-1) + 1, ORPHAN)
    return np.where(group == 0, 0, found)


@lru_cache(maxsize=64)
def _chain(n: int) -> tuple[IntArray, IntArray, BoolArray, IntArray]:
    child = np.append(np.arange(1, n), -1)
    return child, np.full(n, -1), np.tri(n, dtype=np.bool_), np.arange(n)


def _links(parents: IntArray, n: int) -> tuple[IntArray, IntArray]:
    """First child and next sibling of every slot, children in slot order, -1 for none."""
    size = len(parents)
    child, sibling = np.full((size, n), -1), np.full((size, n), -1)
    rows = np.arange(size)
    for slot in range(n - 1, 0, -1):
        parent = parents[:, slot - 1]
        kept = parent != ORPHAN
        live, at = rows[kept], parent[kept]
        sibling[live, slot] = child[live, at]
        child[live, at] = slot
    return child, sibling


def _ancestors(parents: IntArray, n: int, depth: int) -> tuple[BoolArray, IntArray]:
    """mask[b, i, j]: slot i sees slot j (itself, its ancestors, the root). And each slot's level. Cut at `depth`."""
    size = len(parents)
    mask, level = np.zeros((size, n, n), dtype=np.bool_), np.zeros((size, n), dtype=np.int64)
    mask[:, :, 0] = True
    row, slot = np.nonzero(np.ones((size, n - 1), dtype=np.bool_))
    slot = slot + 1
    at = slot.copy()
    for _ in range(depth):
        mask[row, slot, at] = True
        level[row, slot] += 1
        above = parents[row, at - 1]
        climbing = above > 0
        row, slot, at = row[climbing], slot[climbing], above[climbing]
    return mask, level


def _write_mask(out: Any, mask: BoolArray, lens: Any, mode: int) -> None:
    size, n, _ = mask.shape
    if mode == QLEN_ONLY:
        out[: size * n * n].reshape(size, n, n)[...] = mask
        return
    base = 0
    for b, seq_len in enumerate(lens.tolist()):
        width = seq_len + n
        out[base : base + n * width].reshape(n, width)[:, seq_len:] = mask[b]
        base += n * width


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root, at every slot into the child that equals the target's own next token.

    Writes along the walked path only: predicts[row] = the target's token after that row, accept_index[b, :k+1] = the
    path's rows, accept_token_num[b] = k, the drafted tokens accepted (at most accept_index.shape[1] - 1). The argument
    names are SGLang's, misspelling included.
    """
    rows, child, sibling = retrive_index.numpy(), retrive_next_token.numpy(), retrive_next_sibling.numpy()
    drafted, target = candidates.numpy(), target_predict.numpy().reshape(-1)
    width = accept_index.shape[1]
    n = drafted.shape[1]
    if (child == _chain(n)[0]).all() and (sibling == -1).all():
        path, accepted = rows, _walk_chains(drafted, target[rows], width)
    else:
        path, accepted = _walk_trees(drafted.tolist(), rows, child.tolist(), sibling.tolist(), target, width)
    span = min(width, path.shape[1])
    used = np.arange(span) <= accepted[:, None]
    walked = path[:, :span][used]
    accept_index.numpy()[:, :span][used] = walked
    accept_token_num.numpy()[: len(accepted)] = accepted
    predicts.numpy()[walked] = target[walked]


def _walk_chains(drafted: Any, wanted: Any, width: int) -> IntArray:
    hits: BoolArray = drafted[:, 1:width] == wanted[:, : min(width, drafted.shape[1]) - 1]
    accepted: IntArray = np.logical_and.accumulate(hits, axis=1).sum(axis=1)
    return accepted


def _walk_trees(
    drafted: list[list[int]], rows: Any, child: list[list[int]], sibling: list[list[int]], target: Any, width: int
) -> tuple[IntArray, IntArray]:
    """Rows of the accepted path [B, width] and its length without the root; a plain walk beats masks at these sizes."""
    slots = np.zeros((len(drafted), width), dtype=np.int64)
    accepted = np.zeros(len(drafted), dtype=np.int64)
    wanted = target[rows].tolist()
    for b, tokens in enumerate(drafted):
        at = 0
        for step in range(1, width):
            slot, want = child[b][at], wanted[b][at]
            while slot != -1 and tokens[slot] != want:
                slot = sibling[b][slot]
            if slot == -1:
                break
            at = slots[b, step] = slot
            accepted[b] = step
    return np.take_along_axis(rows, slots, axis=1), accepted
