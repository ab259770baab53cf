"""What makes two things the same: canonical JSON and its digest, the contracts of target and draft, the splits."""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hexadecimal sha256."""


GATE_BUCKETS = range(0, 10)


SELECTION_BUCKETS = range(10, 15)


class Value(BaseModel):
    """A frozen value; unknown fields are an error, so that a newer record is never half-read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; what digests are taken of."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


class Record(Value):
    """A value that is known by the digest of what it says."""

    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class GrownRecord(Record):
    """A record that got fields after some of its kind were stored.

    At its default a later field is left out of the JSON, so that what was stored before reads back to the byte and
    keeps its digest, by which verdicts and signatures name it.
    """

    LATER: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _as_stored(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        for name in self.LATER:
            if name in dumped and getattr(self, name) == type(self).model_fields[name].default:
                del dumped[name]
        return dumped


class Split(StrEnum):
    """What a conversation may be used for; decided once, by its hash, for ever."""

    GATE = "gate"
    SELECTION = "selection"
    TRAIN = "train"

    @property
    def folder(self) -> str:
        """Folder of its shards: the trainer never lists ``held_out``, the evaluator never reads ``train``."""
        return "train" if self is Split.TRAIN else "held_out"


def split_of(conversation: str) -> Split:
    """Split of a conversation: 10% gate, 5% checkpoint selection, the rest training.

    Args:
        conversation: hexadecimal hash of the conversation (at least 8 digits).
    """
    bucket = int(hashlib.sha256(b"tide-split/1:" + conversation.encode()).hexdigest()[:8], 16) % 100
    if bucket in GATE_BUCKETS:
        return Split.GATE
    return Split.SELECTION if bucket in SELECTION_BUCKETS else Split.TRAIN


def _differences(ours: Record, theirs: Record, skip: frozenset[str] = frozenset()) -> tuple[str, ...]:
    a, b = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    return tuple(f"{k}: {a[k]} != {b[k]}" for k in a if k not in skip and a[k] != b[k])


class TargetContract(Record):
    """Identity of the target model, part by part, as far as its hidden states depend on it."""

    weights: Digest
    tokenizer: Digest
    dtype: str
    quantization: str | None = None
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    aux_layers: tuple[int, ...]
    """Layers really captured, as indices of layer OUTPUTS (id i = output of layer i, the embedding not counted)."""

    def differences(self, other: TargetContract) -> tuple[str, ...]:
        """One line a differing part; empty when both are the same target."""
        return _differences(self, other)


class DraftContract(Record):
    """The configuration that a draft's forward pass depends on, and the digest of its vocabulary map."""

    architecture: str = "LlamaForCausalLMEagle3"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: str | None = None
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    vocab_map: Digest
    """sha256 of d2t as little-endian int64."""

    def differences(self, other: DraftContract, *, hot_swap: bool = False) -> tuple[str, ...]:
        """One line a differing part.

        Args:
            hot_swap: leave out ``vocab_map``, which a running engine may exchange; any other part needs a restart.
        """
        return _differences(self, other, frozenset({"vocab_map"}) if hot_swap else frozenset())
