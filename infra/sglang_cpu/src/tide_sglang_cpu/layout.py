"""Where the keys of a batch lie and which of them each query may see; and attention over such a layout.

Owns: `Padded` (every sequence has the same number of queries: decode, verify, drafting) and `Ragged` (prefill), and the
exact attention over each. Does not know: SGLang. A layout is built once per forward and used by all layers.

Shapes: B sequences, q queries each, L keys at most, H query heads, KV key heads, D the head width. `table` is SGLang's
request-to-slot table [requests, positions] int32; a slot indexes the first axis of a KV buffer [slots, KV, D].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Padded:
    """B sequences of `queries` queries each, their keys padded to L. `visible` [B, q, L] bool; None: all are seen."""

    slots: torch.Tensor  # [B*L] int64
    batch: int
    queries: int
    visible: torch.Tensor | None
    _biases: dict[tuple[torch.dtype, int], torch.Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype, group: int) -> torch.Tensor | None:
        """Additive mask [B, 1, group*q, L] for queries laid out group-major; made once for all layers."""
        if self.visible is None:
            return None
        key = (dtype, group if self.queries > 1 else 1)  # one query: the mask broadcasts over the group
        if key not in self._biases:
            bias = torch.zeros(self.visible.shape, dtype=dtype).masked_fill_(~self.visible, float("-inf"))
            self._biases[key] = bias.repeat(1, key[1], 1)[:, None]
        return self._biases[key]


@dataclass
class Ragged:
    """Sequences of different numbers of queries, one attention call each."""

    rows: list["RaggedRow"]


@dataclass
class RaggedRow:
    """One sequence of a Ragged layout."""

    slots: torch.Tensor  # [L] int64
    queries: int
    visible: torch.Tensor | None  # [q, L] bool; None: no prefix, plainly causal


Layout = Padded | Ragged


def committed(
    table: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, queries: int, tree: torch.Tensor | None = None
) -> Padded:
    """The last `queries` of each sequence's `lens` [B] keys attend to it, causally or as `tree` [B, q, q] bool says."""
    longest = int(lens.max())
    place = torch.arange(longest)
    slots = table[requests.long(), :longest].long()
    alike = int(lens.min()) == longest
    if not alike:
        slots = _pad_with_own(slots, place < lens[:, None])
    if queries == 1 and alike:
        return Padded(slots.view(-1), len(lens), 1, None)
    first = lens - queries
    visible = place <= (first[:, None] + torch.arange(queries))[:, :, None]
    if tree is not None:
        at = (first[:, None] + torch.arange(queries))[:, None, :].expand(-1, queries, -1)
        visible = visible.scatter(2, at, tree)
    return Padded(slots.reshape(-1), len(lens), queries, visible)


def drafted(table: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, topk: int, steps: int) -> list[Padded]:
    """One layout a draft step but the last: each of the topk branches sees the prefix and its own earlier tokens.

    A branch's drafted tokens have `steps` slots of their own, behind the prefix of `lens` [B] keys and the branches
    before it. Sequences are ordered request by request, branch by branch: B*topk of one query.
    """
    requests, lens = requests.long().repeat_interleave(topk), lens.repeat_interleave(topk)
    longest = int(lens.max())
    place = torch.arange(longest + steps)
    branch = torch.arange(topk).repeat(len(lens) // topk)
    column = torch.where(place < lens[:, None], place, place + (branch * steps)[:, None])
    limit = (lens + steps)[:, None]
    column = torch.where(place < limit, column, 0)
    slots = table[requests[:, None], column].long()
    alike = int(lens.min()) == longest
    layouts = []
    for step in range(steps - 1):
        width = longest + step + 1
        seen = None if alike else (place[:width] <= (lens + step)[:, None])[:, None]
        layouts.append(Padded(slots[:, :width].reshape(-1), len(lens), 1, seen))
    return layouts


def ragged(table: torch.Tensor, requests: Sequence[int], lens: Sequence[int], queries: Sequence[int]) -> Ragged:
    """Prefill: the last queries[i] of the lens[i] keys of request i attend causally."""
    rows = []
    for request, length, count in zip(requests, lens, queries, strict=True):
        prefix = length - count
        visible = None if prefix == 0 else torch.ones(count, length, dtype=torch.bool).tril_(prefix)
        rows.append(RaggedRow(table[request, :length].long(), count, visible))
    return Ragged(rows)


def _pad_with_own(slots: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    # A masked key still enters the products, and 0 * NaN is NaN: never read another request's memory as padding.
    return torch.where(real, slots, slots[:, :1])


def attend(layout: Layout, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of q [tokens, H, D] over the KV buffers [slots, KV, D] and [slots, KV, Dv]: [tokens, H*Dv], exact."""
    if isinstance(layout, Padded):
        return _attend_padded(layout, q, keys, values, scale)
    out, at = [], 0
    for row in layout.rows:
        out.append(_attend_row(row, q[at : at + row.queries], keys, values, scale))
        at += row.queries
    return torch.cat(out) if len(out) > 1 else out[0]


def _attend_padded(
    layout: Padded, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    # One call for the batch: the query heads that share a key head are folded into the query axis (group-major).
    batch, n, kv = layout.batch, layout.queries, keys.shape[1]
    group = q.shape[1] // kv
    folded = q.reshape(batch, n, kv, group, -1)
    folded = folded.view(batch, kv, group, -1) if n == 1 else folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
    k = keys.index_select(0, layout.slots).view(batch, -1, kv, keys.shape[2]).transpose(1, 2)
    v = values.index_select(0, layout.slots).view(batch, -1, kv, values.shape[2]).transpose(1, 2)
    out = scaled_dot_product_attention(folded, k, v, attn_mask=layout.bias(q.dtype, group), scale=scale)
    if n > 1:
        out = out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * n, -1)


def _attend_row(
    row: RaggedRow, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    k = keys.index_select(0, row.slots).transpose(0, 1)[None]
    v = values.index_select(0, row.slots).transpose(0, 1)[None]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=row.visible,
        is_causal=row.visible is None,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1).flatten(1)
