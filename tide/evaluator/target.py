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
        # Written again and again: fresh memory of this size costs as much as the product.
        self._logits = torch.empty((LOGIT_ROWS, len(head)))

    def chances(self, hidden: torch.Tensor, tokens: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
        """[m] probability that the sampled token is one of those offered.

        Args:
            hidden: [m, H] after the final norm, any float dtype.
            tokens: [m, k] target ids, no two of those offered alike.
            offered: [m, k] bool; the others may be any number.
        """
        parts = zip(hidden.split(LOGIT_ROWS), tokens.split(LOGIT_ROWS), offered.split(LOGIT_ROWS), strict=True)
        return torch.cat([self._block(*part) for part in parts])

    def _block(self, hidden: torch.Tensor, tokens: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
        logits = self._logits[: len(hidden)]
        torch.mm(hidden.to(torch.float32) / self._temperature, self._head.T, out=logits)
        logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        shares = logits.gather(1, tokens.clamp(min=0)) / logits.sum(-1, keepdim=True)
        return shares.masked_fill(~offered, 0.0).sum(-1)
