"""Drafting from one anchor of each of many requests at once, each as if it were alone.

Owns the steps a draft takes behind its anchors and what it attends to there. Knows nothing of which proposals count
(``tree``), of logged tokens or of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tide.evaluator.draft_module import Eagle3Draft, Prefix


class Beams:
    """One beam an anchor at first, as many as ``advance`` is given ids behind it.

    As in SGLang a beam attends to its request's rows up to the anchor and to what was drafted IN ITS OWN PLACE since,
    whichever beam it descends from: when beams are selected anew, hidden states move with them, keys and values do not
    (``generate_draft_decode_kv_indices``).

    Args:
        draft: the module.
        prefixes: [a] cache of each anchor's request.
        anchors: [a] row of each that is drafted from; not before the prefix's ``first``.
    """

    def __init__(self, draft: Eagle3Draft, prefixes: Sequence[Prefix], anchors: Sequence[int]) -> None:
        self._draft, self._prefixes, self._anchors = draft, list(prefixes), torch.tensor(anchors)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        places = [(p, anchor - p.first) for p, anchor in zip(prefixes, anchors, strict=True)]
        hidden = torch.stack([p.hidden[place] for p, place in places])
        inputs = draft.inputs(torch.stack([p.next_ids[place] for p, place in places]), hidden)
        self._hidden = self._layer(hidden, inputs, width=1)

    def logits(self) -> torch.Tensor:
        """[a, beams, DV] float32 at the present depth."""
        return self._draft.logits(self._hidden).unflatten(0, (len(self._prefixes), -1))

    def keep(self, alive: torch.Tensor) -> None:
        """Go on with some of the anchors only ([a] bool): the others need no further step."""
        self._hidden = self._hidden.unflatten(0, (len(self._prefixes), -1))[alive].flatten(0, 1)
        self._prefixes = [p for p, on in zip(self._prefixes, alive.tolist(), strict=True) if on]
        self._anchors = self._anchors[alive]
        self._keys = [keys[:, alive] for keys in self._keys]
        self._values = [values[:, alive] for values in self._values]

    def advance(self, ids: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """One step deeper.

        Args:
            ids: [a, beams] what each beam proposed last.
            parents: [a, beams] the present beam whose hidden state each goes on from; itself when None.
        """
        count, width = ids.shape
        hidden = self._hidden
        if parents is not None:
            rows = torch.arange(count)[:, None] * (len(hidden) // count) + parents
            hidden = hidden[rows.flatten()]
        inputs = self._draft.inputs(ids.flatten(), hidden)
        positions = (self._anchors + len(self._keys) + 1).repeat_interleave(width)
        self._keys.append(self._draft.heads("k", inputs, positions).unflatten(1, (count, width)))
        self._values.append(self._draft.values(inputs).unflatten(1, (count, width)))
        self._hidden = self._layer(hidden, inputs, width)

    def _layer(self, hidden: torch.Tensor, inputs: torch.Tensor, width: int) -> torch.Tensor:
        positions = (self._anchors + len(self._keys)).repeat_interleave(width)
        queries = self._draft.heads("q", inputs, positions).unflatten(1, (-1, width))
        return self._draft.finish(hidden, self._attend(queries))

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        """[heads, a, beams, D] -> [heads, a * beams, D]."""
        heads, count, beams, width = queries.shape
        grouped = (queries / math.sqrt(width)).unflatten(0, (-1, self._draft.groups))
        shares = self._scores(grouped).softmax(-1)
        # A request's own matrix products: padded ones would copy every cache at every step.
        seen = self._seen()
        attended = torch.stack(
            [
                share[..., :rows] @ p.values[:, :rows]
                for share, p, rows in zip(shares, self._prefixes, seen, strict=True)
            ]
        ).unflatten(2, (-1, beams))
        for place, values in enumerate(self._values, start=max(seen)):
            own = shares[..., place].unflatten(2, (-1, beams))
            attended = attended + own[..., None] * values.transpose(0, 1)[:, :, None]
        return attended.permute(1, 2, 0, 3, 4).reshape(heads, count * beams, width)

    def _scores(self, grouped: torch.Tensor) -> torch.Tensor:
        """[kv heads, groups, a, beams, D] -> [a, kv heads, groups * beams, rows + drafted]."""
        seen = self._seen()
        each = grouped.permute(2, 0, 1, 3, 4).flatten(2, 3)
        scores = each.new_full((*each.shape[:-1], max(seen) + len(self._keys)), -math.inf)
        for index, (prefix, rows) in enumerate(zip(self._prefixes, seen, strict=True)):
            scores[index, ..., :rows] = each[index] @ prefix.keys[:, :rows].transpose(-1, -2)
        for place, keys in enumerate(self._keys, start=max(seen)):
            scores[..., place] = (grouped * keys[:, None]).sum(-1).permute(2, 0, 1, 3).flatten(2, 3)
        return scores

    def _seen(self) -> list[int]:
        """[a] rows of its request that each anchor attends to."""
        return [anchor + 1 for anchor in self._anchors.tolist()]
