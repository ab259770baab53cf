"""The target's own distribution at logged rows: the chance that sampling it gives a proposal.

Owns the head, the temperature and the bound on logits held. Knows nothing of drafts or of walks.
"""

from __future__ import annotations

import torch

LOGIT_ROWS = 256
"""Rows whose logits are held at once."""


class SampledTarget:
    """softmax(lm_head(last hidden state) / temperature), in float32.

    Args:
        head: [V, H] lm_head weight, any float dtype.
        temperature: above 0.
    """

    def __init__(self, head: torch.Tensor, temperature: float) -> None:
        self._head, self._temperature = head.to(torch.float32), temperature

    def chances(self, hidden: torch.Tensor, tokens: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
        """[m] probability that the sampled token is one of those offered.

        Args:
            hidden: [m, H] after the final norm, any float dtype.
            tokens: [m, k] target ids, no two of those offered alike.
            offered: [m, k] bool; the others may be any number.
        """
        found = torch.zeros(len(hidden))
        for start in range(0, len(hidden), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            logits = hidden[rows].to(torch.float32) @ self._head.T / self._temperature
            chosen = logits.gather(1, tokens[rows].clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
            found[rows] = chosen.exp().masked_fill(~offered[rows], 0.0).sum(-1)
        return found
