"""What a training run takes of a device's memory, of disk and of shared memory, before it is started.

Pure: shapes and sizes in, bytes out. The figures are estimates for SpecForge 0.2.0's EAGLE3 trainer, replicated over
the ranks (NO_SHARD), with the compact teacher; each formula says what it was counted from or held against.
"""

from __future__ import annotations

import math

from tide.domain import DraftContract, Value
from tide.models.draft_format import expected_shapes

SCORE_BYTES = 15.0
"""Of one attention score (query row x key row x head x draft step) with ``sdpa``, kept for the backward pass and used
in it. Fitted to the peak memory that SpecForge's own benchmark printed (SpecForge pull request 97: B200, bfloat16,
batch 4, 32 heads, 7 steps): with ``_attention_rows`` within 1% from 640 to 3200 rows (66.7 GiB at 2176)."""
WORKERS, PREFETCHED = 4, 2
"""Data loader processes a rank on GPUs, and batches that each holds ready in shared memory (PyTorch's default)."""
_STATE_BYTES = 16
"""A trainable parameter beside its weight and gradient: fp32 master, its gradient in the step, and AdamW's two moments
(specforge/optimizer.py)."""
_SAVED_STATE_BYTES = 12
"""The same in a checkpoint, which keeps no gradient."""
_CHUNK = 16384
"""``compact_teacher_chunk_size`` of our runs."""


class MemoryEstimate(Value):
    """Bytes on one device, by what takes them."""

    weights: int
    """Trainable parameters, gradients, fp32 copies and optimizer states."""
    frozen: int
    """The target's embedding and lm_head."""
    activations: int
    """What the draft's layer keeps for the backward pass, all draft steps."""
    vocabulary: int
    """Logits and the target's distributions over the draft vocabulary."""
    scores: int
    """Attention scores that are materialised; 0 with ``flex_attention``."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.frozen + self.activations + self.vocabulary + self.scores


def parameters(contract: DraftContract) -> int:
    """Trainable parameters of a draft: all its tensors but the vocabulary maps."""
    return sum(math.prod(shape) for name, shape in expected_shapes(contract).items() if name not in {"d2t", "t2d"})


def training_memory(
    contract: DraftContract, *, length: int, batch: int, ttt_length: int, backend: str, width: int
) -> MemoryEstimate:
    """Bytes that one rank needs at its worst moment.

    Args:
        length: rows of the longest sample.
        batch: samples computed at once.
        ttt_length: draft steps unrolled for each sample.
        backend: ``sdpa`` or ``flex_attention``.
        width: bytes of a weight and of an activation, 2 in bfloat16.
    """
    rows = batch * length
    vocabulary = contract.draft_vocab_size
    teacher = 2 * 4 * batch * (length + ttt_length) * vocabulary + rows * _CHUNK * (width + 8)
    # Kept a step: the logits and the float32 target of the loss; beside them, once, what the metrics take.
    losses = rows * vocabulary * (ttt_length * (width + 4) + 3 * 4)
    scores = batch * contract.num_attention_heads * length**2 * ttt_length if backend == "sdpa" else 0
    layer = _attention_rows(contract, width) + _other_rows(contract, width)
    return MemoryEstimate(
        weights=parameters(contract) * (2 * width + _STATE_BYTES),
        frozen=contract.vocab_size * width * (contract.hidden_size + contract.target_hidden_size),
        activations=rows * ttt_length * layer,
        vocabulary=teacher + losses,
        scores=math.ceil(scores * SCORE_BYTES * width / 2),
    )


def _attention_rows(contract: DraftContract, width: int) -> int:
    """Bytes a row and step of the attention module, scores left out; held against the same benchmark's flex runs."""
    queries, keys = (n * contract.head_dim for n in (contract.num_attention_heads, contract.num_key_value_heads))
    return width * (8 * contract.hidden_size + 8 * queries + 5 * keys)


def _other_rows(contract: DraftContract, width: int) -> int:
    """Bytes a row and step of norms (which compute in float32), residuals and the MLP, counted from the code."""
    return width * (6 * contract.hidden_size + 4 * contract.intermediate_size) + 24 * contract.hidden_size


def state_bytes_a_row(hidden_size: int) -> int:
    """Bytes of one captured row in a shard: three layers and the last state in bfloat16, ids and offsets."""
    return 4 * hidden_size * 2 + 16


def sample_bytes_a_row(hidden_size: int, width: int) -> int:
    """Bytes of one row in a sample file: captured layers in the draft's dtype, last state in bfloat16, id and mask."""
    return hidden_size * (3 * width + 2) + 16


def disk_bytes(contract: DraftContract, *, tokens: int, checkpoints: int, width: int) -> int:
    """Bytes of scratch and cache that a run needs at once: shards, samples, checkpoints and exported drafts.

    Args:
        tokens: rows trained on.
        checkpoints: kept by the run; SpecForge holds one more while it saves.
    """
    hidden = contract.target_hidden_size
    states = tokens * (state_bytes_a_row(hidden) + sample_bytes_a_row(hidden, width))
    embedding = contract.vocab_size * contract.hidden_size * width
    saved = (checkpoints + 1) * (parameters(contract) * (width + _SAVED_STATE_BYTES) + embedding)
    return states + saved + checkpoints * parameters(contract) * 2


def shared_memory_bytes(hidden_size: int, *, length: int, batch: int, ranks: int, width: int) -> int:
    """Bytes in ``/dev/shm`` of what the data loaders of all ranks hold ready on GPUs."""
    return ranks * WORKERS * PREFETCHED * batch * length * sample_bytes_a_row(hidden_size, width)
