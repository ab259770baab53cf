"""The draft vocabulary: which target tokens a draft can propose, choosing them, moving a trained head to a new choice.

Owns the map d2t (target id minus draft id) and t2d, its file for SpecForge, and the re-indexing of a parent's head.
Knows nothing of shards or of the training process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tide.errors import ContractMismatch, DraftError

GENERATED_WEIGHT = 4
"""A draft proposes what the target generates: a generated token weighs this much more than one of a prompt."""


@dataclass(frozen=True)
class Vocabulary:
    """Target ids a draft knows, in ascending order."""

    d2t: torch.Tensor
    """[DV] int64: target id minus draft id."""
    t2d: torch.Tensor
    """[V] bool: target ids that the draft knows."""

    @property
    def ids(self) -> torch.Tensor:
        """[DV] int64: target id of each draft id."""
        return self.d2t + torch.arange(self.d2t.numel())

    @classmethod
    def of(cls, ids: torch.Tensor, vocab_size: int) -> Vocabulary:
        """From ascending target ids [DV] int64."""
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        return cls(d2t=ids - torch.arange(ids.numel()), t2d=t2d)

    @classmethod
    def of_low_ids(cls, size: int, vocab_size: int) -> Vocabulary:
        """The first ``size`` target ids: a choice made without data."""
        return cls.of(torch.arange(size), vocab_size)

    @classmethod
    def of_draft(cls, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> Vocabulary:
        """The vocabulary that a draft carries; the identity when it speaks the target's whole vocabulary.

        Raises:
            DraftError: d2t and t2d do not describe the same tokens.
        """
        if "d2t" not in tensors:
            return cls.of_low_ids(vocab_size, vocab_size)
        found = cls(d2t=tensors["d2t"].long(), t2d=tensors["t2d"].bool())
        selected = found.t2d.nonzero().flatten()
        if selected.numel() != found.d2t.numel() or not torch.equal(selected, found.ids):
            raise DraftError(
                f"draft vocabulary: d2t ({found.d2t.numel()} ids) and t2d ({selected.numel()} ids) disagree; "
                "training on a wrong map ruins a draft without an error, so take the draft's own files"
            )
        return found

    def same_as(self, other: Vocabulary) -> bool:
        """True when both stand for the same tokens in the same order."""
        return torch.equal(self.d2t, other.d2t) and torch.equal(self.t2d, other.t2d)


def choose_vocabulary(seen: torch.Tensor, generated: torch.Tensor, size: int) -> Vocabulary:
    """The most frequent tokens, generated ones counting more; ties and unused room go to low ids.

    Args:
        seen: [V] int64, how often each target id stands in the data, prompts included.
        generated: [V] int64, how often it was generated.
        size: how many ids; all of them when the vocabulary is smaller.
    """
    weight = seen + GENERATED_WEIGHT * generated
    order = torch.sort(weight, descending=True, stable=True).indices
    return Vocabulary.of(order[: min(size, weight.numel())].sort().values, weight.numel())


def coverage(vocabulary: Vocabulary, generated: torch.Tensor) -> float:
    """Share of generated tokens inside the vocabulary; 1.0 when nothing was generated.

    Args:
        generated: [V] int64 counts by target id.
    """
    total = int(generated.sum())
    return int(generated[vocabulary.t2d].sum()) / total if total else 1.0


def reindex(
    tensors: Mapping[str, torch.Tensor], vocabulary: Vocabulary, target_head: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A draft's weights under a new vocabulary: kept ids keep their head rows bit for bit, new ids get the target's.

    A trained head has shrunk against the target's (to about 0.3 of its norm), so new rows are scaled by the ratio of
    norms over the parent's own ids: unscaled they would win every argmax.

    Args:
        tensors: the parent's, with ``lm_head.weight`` [DV, H].
        vocabulary: the new one.
        target_head: [V, H] lm_head of the target.

    Raises:
        DraftError: the parent's head and the target's differ in width.
    """
    head = tensors["lm_head.weight"]
    if head.shape[1] != target_head.shape[1]:
        raise DraftError(f"draft head is {head.shape[1]} wide, the target's {target_head.shape[1]}")
    old = Vocabulary.of_draft(tensors, target_head.shape[0])
    ratio = head.float().norm() / target_head[old.ids].float().norm()
    rows = (target_head[vocabulary.ids].float() * ratio).to(head.dtype)
    position = torch.full((target_head.shape[0],), -1, dtype=torch.int64)
    position[old.ids] = torch.arange(old.ids.numel())
    kept = position[vocabulary.ids]
    rows[kept >= 0] = head[kept[kept >= 0]]
    return {**tensors, "lm_head.weight": rows, "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def write_mapping(path: Path, vocabulary: Vocabulary) -> None:
    """Write the map as SpecForge reads it."""
    torch.save({"t2d": vocabulary.t2d.clone(), "d2t": vocabulary.d2t.clone()}, path)


def check_mapping(path: Path, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> None:
    """Refuse a map that is not the draft's own; the check before step 0, and of every checkpoint.

    Raises:
        DraftError: the draft's own map is inconsistent.
        ContractMismatch: the file's map is another one; says how many tokens moved.
    """
    stored = torch.load(path, weights_only=True)
    found = Vocabulary(d2t=stored["d2t"].long(), t2d=stored["t2d"].bool())
    own = Vocabulary.of_draft(tensors, vocab_size)
    if own.same_as(found):
        return
    if own.d2t.shape != found.d2t.shape:
        detail = f"draft_vocab_size: {own.d2t.numel()} != {found.d2t.numel()}"
    else:
        detail = f"d2t: {int((own.d2t != found.d2t).sum())} of {own.d2t.numel()} tokens stand for another target id"
    raise ContractMismatch(f"draft vocabulary (weights and {path.name})", (detail,))
