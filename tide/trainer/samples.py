"""Sample files for SpecForge, made from shards: one request each, trimmed, masked and checked.

Owns which rows are trained on and which requests are refused. The files are pickle, which SpecForge reads without
restraint: they are made here, on this machine, for one run, and never stored or accepted from elsewhere.
Knows nothing of vocabularies or of the training process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tide.domain import Shard, ShardRequest, Split, TargetContract, split_of
from tide.errors import BadInputError, ContractMismatch, ShardError
from tide.states.shards import RequestStates, ShardReader, read_manifest
from tide.trainer.base import RefusedSample

SAMPLES_FOLDER = "rows_0-2000"
"""SpecForge's own name for a folder of samples; it walks the tree, so one is enough."""


@dataclass
class Samples:
    """What was materialised, and what was left out."""

    folder: Path
    seen: torch.Tensor
    """[V] int64: how often each target id stands in the samples."""
    generated: torch.Tensor
    """[V] int64: how often it was generated."""
    count: int = 0
    tokens: int = 0
    refused: list[RefusedSample] = field(default_factory=list)


@dataclass(frozen=True)
class Cut:
    """How a request is cut to a sample."""

    prompt_rows: int
    """Prompt rows kept before the generated ones."""
    max_length: int
    """Rows kept in all; what is generated beyond is left out."""
    dtype: torch.dtype = torch.bfloat16
    """Of the captured layers: what the draft computes in."""


def materialise(
    shards: Sequence[Path], folder: Path, *, target: TargetContract, cut: Cut, newest: int | None = None
) -> Samples:
    """Write one sample file a usable request, oldest shard first.

    Args:
        shards: safetensors files of the ``train`` split, each with its manifest beside it.
        folder: a fresh folder of this run alone.
        target: every shard must be of it.
        newest: at most this many requests, the newest ones; None takes all.

    Raises:
        BadInputError: a shard is of another split, holds a held-out conversation, or no usable request is left.
        ContractMismatch: a shard is of another target.
        ShardError: a shard without a valid manifest.
        OSError: the disk refused.
    """
    chosen = _newest_requests(_checked_manifests(shards, target), newest)
    destination = folder / SAMPLES_FOLDER
    destination.mkdir(parents=True)
    zeros = torch.zeros(target.vocab_size, dtype=torch.int64)
    samples = Samples(folder, zeros.clone(), zeros.clone())
    done: set[str] = set()
    for path, manifest, skip in chosen:
        for index, (info, states) in enumerate(_requests(path, manifest)):
            if index < skip:
                continue
            reason = states if isinstance(states, str) else fault(states, target)
            if info.request in done:
                reason = "duplicate: this request was taken before"
            if reason:
                samples.refused.append(RefusedSample(request=info.request, reason=reason))
                continue
            assert isinstance(states, RequestStates)
            done.add(info.request)
            write_sample(destination / f"data_{samples.count:08d}.ckpt", states, cut, samples)
    if not samples.count:
        reasons = "; ".join(sorted({r.reason for r in samples.refused})) or "the shards are empty"
        raise BadInputError(f"no usable training sample in {len(shards)} shards: {reasons}")
    return samples


def fault(states: RequestStates, target: TargetContract) -> str | None:
    """Why a request cannot be trained on, or None.

    SpecForge checks none of this: short rows train in silence, one NaN ruins the weights, an empty mask gives loss 0.
    """
    ids = states.input_ids
    if reason := _value_fault(states, target.hidden_size):
        return reason
    if states.first_row + states.rows < states.prompt_len:
        return f"short rows: they end at {states.first_row + states.rows}, inside the prompt of {states.prompt_len}"
    if bool(((ids < 0) | (ids >= target.vocab_size)).any()):
        return f"ids outside the vocabulary of {target.vocab_size}"
    if not bool(supervised(states).any()):
        return "zero mask: no generated row can be supervised"
    return None


def _value_fault(states: RequestStates, width: int) -> str | None:
    for name, values, wanted in (("aux", states.aux_hidden, 3 * width), ("last", states.last_hidden, width)):
        if tuple(values.shape) != (states.rows, wanted):
            return f"short rows: {name}_hidden is {tuple(values.shape)}, expected {(states.rows, wanted)}"
        if not bool(torch.isfinite(values).all()):
            return f"not finite: {name}_hidden has {int((~torch.isfinite(values)).sum())} bad values"
        if not bool(values.any(dim=-1).all()):
            return f"empty rows: {name}_hidden has rows of zeros only"
    return None


def supervised(states: RequestStates) -> torch.Tensor:
    """[n] bool: rows that the draft learns from.

    At row p SpecForge feeds the token of p+1 and the states of p, and asks for what the target says at p+1. In serving
    the first draft step has the first generated token and the last prompt row: so supervision starts at the last
    prompt row, and the last row, which has no successor, is left out.
    """
    mask = states.generated_rows()
    mask[-1:] = False
    return mask


def _checked_manifests(shards: Sequence[Path], target: TargetContract) -> list[tuple[Path, Shard]]:
    found = []
    for path in shards:
        manifest = read_manifest(path)
        if manifest.split != Split.TRAIN.folder:
            raise BadInputError(f"shard {path.name} is of the split {manifest.split}: only {Split.TRAIN} is trained on")
        if parts := target.differences(manifest.target):
            raise ContractMismatch(f"target (training run and shard {path.name})", parts)
        for request in manifest.requests:
            if (split := split_of(request.conversation)) is not Split.TRAIN:
                raise BadInputError(
                    f"shard {path.name}: request {request.request} is of a {split} conversation. The gate would be "
                    "contaminated: nothing is trained; find out who wrote this shard"
                )
        found.append((path, manifest))
    return sorted(found, key=lambda pair: (pair[1].closed_at, pair[1].name))


def _newest_requests(manifests: Sequence[tuple[Path, Shard]], newest: int | None) -> list[tuple[Path, Shard, int]]:
    """(path, manifest, requests to skip at its front), oldest first, so that ``newest`` requests remain."""
    surplus = 0 if newest is None else max(0, sum(len(m.requests) for _, m in manifests) - newest)
    chosen = []
    for path, manifest in manifests:
        skip = min(surplus, len(manifest.requests))
        surplus -= skip
        if skip < len(manifest.requests):
            chosen.append((path, manifest, skip))
    return chosen


def _requests(path: Path, manifest: Shard) -> Iterator[tuple[ShardRequest, RequestStates | str]]:
    """Each request with its rows, or with the reason why the whole shard cannot be read."""
    try:
        with ShardReader(path) as reader:
            yield from zip(manifest.requests, reader, strict=True)
    except ShardError as error:
        for info in manifest.requests:
            yield info, f"shard unreadable: {error}"


def write_sample(path: Path, states: RequestStates, cut: Cut, samples: Samples) -> None:
    """Write one request as SpecForge reads it, and count it among the samples.

    Raises:
        OSError: the disk refused.
    """
    first = max(0, states.prompt_len - states.first_row - cut.prompt_rows)
    rows = slice(first, min(states.rows, first + cut.max_length))
    ids, mask = states.input_ids[rows].long(), supervised(states)[rows].long()
    mask[-1:] = 0
    sample = {
        # Slices would be saved with their whole storage.
        "input_ids": ids.clone(),
        "loss_mask": mask.clone(),
        "hidden_state": states.last_hidden[None, rows].clone(),
        "aux_hidden_state": states.aux_hidden[None, rows].to(cut.dtype).clone(),
    }
    torch.save(sample, path)
    samples.count += 1
    samples.tokens += len(ids)
    size = samples.seen.numel()
    samples.seen += torch.bincount(ids, minlength=size)
    samples.generated += torch.bincount(states.next_ids()[rows][mask.bool()].long(), minlength=size)
