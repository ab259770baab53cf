"""Drafting from many anchors of many requests at once, each as if it were alone.

Owns the steps a draft takes behind its anchors and what it attends to there. Knows nothing of which proposals count
(``tree``), of logged tokens or of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tide.evaluator.draft_module import Eagle3Draft, Prefix

MAX_SCORES = 32_000_000
"""Attention scores held at once (float32): the anchors of a long request attend in blocks."""
LOGIT_ROWS = 512
"""Anchors whose logits are held at once; more make the product no faster."""


@dataclass(frozen=True)
class Anchors:
    """Rows of one request that are drafted from."""

    prefix: Prefix
    rows: torch.Tensor
    """[n] int64, none before the prefix's ``first``."""


class Beams:
    """One beam an anchor at first, as many as ``advance`` is given ids behind it. A anchors in all, in the order given.

    As in SGLang a beam attends to its request's rows up to the anchor and to what was drafted IN ITS OWN PLACE since,
    whichever beam it descends from: when beams are selected anew, hidden states move with them, keys and values do not
    (``generate_draft_decode_kv_indices``).
    """

    def __init__(self, draft: Eagle3Draft, anchors: Sequence[Anchors]) -> None:
        self._draft, self._anchors = draft, list(anchors)
        self._rows = torch.cat([a.rows for a in anchors])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        hidden = torch.cat([a.prefix.hidden[a.rows - a.prefix.first] for a in anchors])
        ids = torch.cat([a.prefix.next_ids[a.rows - a.prefix.first] for a in anchors])
        self._hidden = self._layer(hidden, draft.inputs(ids, hidden), width=1)

    def logits(self) -> torch.Tensor:
        """[A, beams, DV] float32 at the present depth."""
        return self._draft.logits(self._hidden).unflatten(0, (len(self._rows), -1))

    def best(self) -> torch.Tensor:
        """[A] int64: the draft id that the first beam finds likeliest; its logits are never held all at once."""
        hidden = self._hidden.unflatten(0, (len(self._rows), -1))[:, 0]
        return torch.cat([self._draft.logits(rows).argmax(-1) for rows in hidden.split(LOGIT_ROWS)])

    def keep(self, alive: torch.Tensor) -> None:
        """Go on with some of the anchors only ([A] bool): the others need no further step."""
        self._hidden = self._hidden.unflatten(0, (len(self._rows), -1))[alive].flatten(0, 1)
        parts = alive.split([len(a.rows) for a in self._anchors])
        kept = [replace(a, rows=a.rows[part]) for a, part in zip(self._anchors, parts, strict=True)]
        self._anchors = [a for a in kept if len(a.rows)]
        self._rows = self._rows[alive]
        self._keys = [keys[:, alive] for keys in self._keys]
        self._values = [values[:, alive] for values in self._values]

    def advance(self, ids: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """One step deeper.

        Args:
            ids: [A, beams] what each beam proposed last.
            parents: [A, beams] the present beam whose hidden state each goes on from; itself when None.
        """
        count, width = ids.shape
        hidden = self._hidden
        if parents is not None:
            places = torch.arange(count)[:, None] * (len(hidden) // count) + parents
            hidden = hidden[places.flatten()]
        inputs = self._draft.inputs(ids.flatten(), hidden)
        positions = (self._rows + len(self._keys) + 1).repeat_interleave(width)
        self._keys.append(self._draft.heads("k", inputs, positions).unflatten(1, (count, width)))
        self._values.append(self._draft.values(inputs).unflatten(1, (count, width)))
        self._hidden = self._layer(hidden, inputs, width)

    def _layer(self, hidden: torch.Tensor, inputs: torch.Tensor, width: int) -> torch.Tensor:
        positions = (self._rows + len(self._keys)).repeat_interleave(width)
        queries = self._draft.heads("q", inputs, positions) / math.sqrt(self._draft.contract.head_dim)
        queries = queries.unflatten(1, (-1, width)).unflatten(0, (-1, self._draft.groups))
        attended, start = [], 0
        for anchors in self._anchors:
            for rows in anchors.rows.split(self._block(anchors.prefix, width)):
                attended.append(self._attend(queries, anchors.prefix, rows, start))
                start += len(rows)
        return self._draft.finish(hidden, torch.cat(attended, dim=2).flatten(0, 1).flatten(1, 2))

    def _block(self, prefix: Prefix, width: int) -> int:
        """Anchors of a request that may attend at once."""
        keys = prefix.keys.shape[1] + len(self._keys)
        return max(1, MAX_SCORES // (keys * width * self._draft.contract.num_attention_heads))

    def _attend(self, queries: torch.Tensor, prefix: Prefix, rows: torch.Tensor, start: int) -> torch.Tensor:
        """[kv heads, groups, n, beams, D]: some anchors of one request, of [kv heads, groups, A, beams, D] queries."""
        here = slice(start, start + len(rows))
        mine = queries[:, :, here]
        shape, last = mine.shape, int(rows.max()) + 1
        scores = (mine.flatten(1, 3) @ prefix.keys[:, :last].transpose(-1, -2)).unflatten(1, shape[1:4])
        if len(rows) > 1:
            scores.masked_fill_(torch.arange(last) > rows[:, None, None], -math.inf)
        own = [(mine * keys[:, None, here]).sum(-1, keepdim=True) for keys in self._keys]
        shares = (torch.cat([scores, *own], dim=-1) if own else scores).softmax(-1)
        attended = (shares[..., :last].flatten(1, 3) @ prefix.values[:, :last]).unflatten(1, shape[1:4])
        for place, values in enumerate(self._values, start=last):
            attended = attended + shares[..., place, None] * values[:, None, here]
        return attended
