"""The EAGLE3 draft as a torch module of our own, in float32: one Llama layer over embedding | hidden state.

Owns the forward pass. Knows nothing of how proposals are made of it (``drafting``), of shards, verify steps or scores.

At anchor row i the draft sees the target's features up to row i and the id at row i + 1, and proposes the id at row
i + 2; it goes on from its own hidden state and its own proposal, as serving does. Names of the parameters are those of
the draft's file (tide.models.draft_format).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tide.domain import DraftContract
from tide.errors import DraftError
from tide.models.draft_files import DraftFiles


class Eagle3Draft(nn.Module):
    """A draft with the target's embedding, ready to propose.

    Args:
        files: the draft as loaded; its tensors are widened to float32.
        embedding: [V, H] of the target.

    Raises:
        DraftError: an activation or a rope scaling that this module does not compute.
    """

    def __init__(self, files: DraftFiles, embedding: torch.Tensor) -> None:
        super().__init__()
        contract = files.contract
        if contract.hidden_act != "silu":
            raise DraftError(f"draft {files.digest[:12]}: hidden_act is {contract.hidden_act}; EAGLE3 serves silu only")
        self.contract = contract
        self.groups = contract.num_attention_heads // contract.num_key_value_heads
        self.weights = {n: t.to(torch.float32) for n, t in files.tensors.items() if t.is_floating_point()}
        self.target_ids = files.target_ids
        self.embedding = embedding
        self.frequencies = rope_frequencies(contract)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply the matrix ``<name>.weight``."""
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply the RMS norm ``<name>.weight``."""
        return F.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.contract.rms_norm_eps)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """[n, 3T] of any float dtype -> [n, H] float32."""
        return self.linear("fc", aux.to(torch.float32))

    def inputs(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[n, 2H]: what attention reads at rows with these next ids and hidden states."""
        embeds = self.embedding[ids.long()].to(torch.float32)
        return torch.cat(
            [self.norm("midlayer.input_layernorm", embeds), self.norm("midlayer.hidden_norm", hidden)], dim=-1
        )

    def heads(self, name: str, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[heads, n, D]: a rotated projection, ``q`` or ``k``."""
        return rotate(self._split(name, inputs), positions, self.frequencies)

    def values(self, inputs: torch.Tensor) -> torch.Tensor:
        """[kv heads, n, D]."""
        return self._split("v", inputs)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: residual, MLP, residual.

        Args:
            hidden: [n, H] as it entered the layer.
            attended: [heads, n, D].
        """
        joined = attended.transpose(0, 1).reshape(hidden.shape[0], -1)
        hidden = hidden + self.linear("midlayer.self_attn.o_proj", joined)
        x = self.norm("midlayer.post_attention_layernorm", hidden)
        gated = F.silu(self.linear("midlayer.mlp.gate_proj", x)) * self.linear("midlayer.mlp.up_proj", x)
        return hidden + self.linear("midlayer.mlp.down_proj", gated)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, DV] over the draft's own vocabulary."""
        return self.linear("lm_head", self.norm("norm", hidden))

    def prefix(self, aux: torch.Tensor, next_ids: torch.Tensor, first: int = 0) -> Prefix:
        """What the draft keeps of rows whose features the target computed.

        Args:
            aux: [n, 3T].
            next_ids: [n] the id that follows each row.
            first: the first row that drafting may start from.
        """
        hidden = self.project(aux)
        inputs, positions = self.inputs(next_ids, hidden), torch.arange(len(next_ids))
        return Prefix(
            hidden[first:].clone(), next_ids[first:], first, self.heads("k", inputs, positions), self.values(inputs)
        )

    def _split(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        flat = self.linear(f"midlayer.self_attn.{name}_proj", inputs)
        return flat.view(len(inputs), -1, self.contract.head_dim).transpose(0, 1)


@dataclass(frozen=True)
class Prefix:
    """The draft's cache of one request, and what entered its layer at the rows that drafting may start from."""

    hidden: torch.Tensor
    """[n - first, H]"""
    next_ids: torch.Tensor
    """[n - first]"""
    first: int
    keys: torch.Tensor
    """[kv heads, n, D]"""
    values: torch.Tensor
    """[kv heads, n, D]"""


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [heads, n, D] at [n] positions, halves paired as Llama does."""
    angles = positions[:, None].to(torch.float32) * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def rope_frequencies(contract: DraftContract) -> torch.Tensor:
    """[D / 2] float32 rotary frequencies.

    Raises:
        DraftError: a kind of scaling that is not known here.
    """
    width = contract.head_dim
    frequencies: torch.Tensor = 1.0 / contract.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if contract.rope_scaling is None:
        return frequencies
    scaling = json.loads(contract.rope_scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise DraftError(f"draft config: rope scaling {kind!r} is not evaluated here; train the draft with default rope")


def _llama3(frequencies: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    """Long waves stretched by the factor, short ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / factor)
