"""KV-slot and token bookkeeping of speculative decoding, for tensors in CPU memory.

Owns: the semantics of SGLang's `assign_*`, `fill_*`, `rotate_*` and `copy_*` CPU ops. Does not know: trees, attention,
SGLang itself. Every function writes into tensors its caller owns. The tensors are tiny, so the work is done on numpy
views of the same memory: about 1 us an operation where torch's dispatcher takes 3 to 5.
"""

# ruff: noqa: ARG001 - the signatures are those of the compiled ops

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


def _spans(starts: Any, ends: Any) -> tuple[IntArray, IntArray]:
    """Rows and columns of the ragged spans [starts[i], ends[i]), row by row; an empty or negative span has none."""
    lens = np.maximum(ends - starts, 0)
    before = np.cumsum(lens) - lens
    rows = np.repeat(np.arange(len(lens)), lens)
    return rows, np.arange(len(rows)) - (before - starts)[rows]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write `out_cache_loc`, in order, into columns [start[i], end[i]) of row req_pool_indices[i] of `req_to_token`."""
    rows, cols = _spans(start.numpy(), end.numpy())
    req_to_token.numpy()[req_pool_indices.numpy()[rows], cols] = out_cache_loc.numpy()[: len(rows)]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse: pack those columns, row after row, to the front of `out_cache_loc`."""
    rows, cols = _spans(start.numpy(), end.numpy())
    out_cache_loc.numpy()[: len(rows)] = req_to_token.numpy()[req_pool_indices.numpy()[rows], cols]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Pack each request's `topk * num_cols` slots that follow its `seq_lens[i]` tokens into `out_cache_loc`."""
    width = topk * num_cols
    cols = seq_lens.numpy()[:, None] + np.arange(width)
    picked = req_to_token.numpy()[req_pool_indices.numpy()[:, None], cols]
    out_cache_loc.numpy()[: picked.size] = picked.reshape(-1)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """bonus_tokens[i] = the last accepted token of request i; `accept_lens` counts the bonus token."""
    lens = accept_lens.numpy()
    last = np.arange(len(lens)) * accept_stride + lens - 1
    bonus_tokens.numpy()[: len(lens)] = accept_tokens.numpy().reshape(-1)[last]


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted rows (index > -1), in order, to the front of `accept_out_cache_loc`."""
    index = accept_index.numpy().reshape(-1)
    index = index[index > -1]
    accept_out_cache_loc.numpy()[: len(index)] = out_cache_loc.numpy()[index]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put topk_index[i] at its last place, or at select_index[i].

    A request of zero length is left alone, its `topk_index` unused.
    """
    ids, starts, lens = input_ids.numpy(), extend_start_loc.numpy(), extend_seq_lens.numpy()
    _, into = _spans(starts, starts + lens - 1)
    ids[into] = ids[into + 1]
    live = lens > 0
    last = select_index.numpy() if select_index is not None else starts + lens - 1
    ids[last[live]] = topk_index.numpy().reshape(-1)[live]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In every buffer copy row src_loc[i] to row tgt_loc[i]; all rows are read before any is written.

    `data_ptrs` are host addresses, `strides` the bytes of a row. The caller guarantees that the rows exist.
    """
    src, tgt = src_loc.numpy(), tgt_loc.numpy()
    if not len(src):
        return
    rows = int(max(src.max(), tgt.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_ubyte * (rows * stride)).from_address(address)
        table = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        table[tgt] = table[src]
