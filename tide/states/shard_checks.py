"""What a shard must be before it is data: its bytes, its values, and that the states mean what the ids say.

Owns the rules and the rewriting that must keep them. The format is that of tide.states.shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from tide.domain import Shard, ShardRequest, Split, TargetContract
from tide.errors import ContractMismatch, ShardError
from tide.states.shards import DTYPES, RequestStates, ShardReader, read_manifest, write_shard

MIN_SEMANTIC_AGREEMENT = 0.90
"""Share of greedy tokens that lm_head must reproduce, for each request. bf16 rounding alone costs up to 0.04."""
MIN_SEMANTIC_TOKENS = 16
"""Under this many generated tokens one rounding decides the share; such a request is judged by half the bar."""


def validate_shard(
    path: Path, *, expected_target: TargetContract | None = None, head: torch.Tensor | None = None
) -> Shard:
    """Check a shard against every rule of the format, and each request's meaning when a head is given.

    Args:
        path: the safetensors file, its manifest beside it.
        expected_target: the target that serves; a shard of another is refused.
        head: [V, H] lm_head weight; with it, argmax(lm_head(last[t])) must equal ids[t+1] on greedy generated tokens.

    Raises:
        ShardError: names shard, row (or request) and rule.
        ContractMismatch: the shard is of another target; names the part.
    """
    manifest = read_manifest(path)
    if expected_target is not None and (parts := expected_target.differences(manifest.target)):
        raise ContractMismatch(f"shard {path.name}: target", parts)
    _check_bytes(path, manifest)
    with ShardReader(path) as reader:
        for index, states in enumerate(reader):
            _check_request(path.name, index, states, manifest.target)
            if head is not None:
                _check_meaning(path.name, index, states, head)
    return manifest


def rewrite_shard(path: Path, folder: Path, drop: Callable[[ShardRequest], bool]) -> Shard | None:
    """Write a shard again without some of its requests; everything else in its manifest stays as it was.

    Args:
        path: the safetensors file, its manifest beside it.
        folder: where the new one goes; its name is another, as its content is.
        drop: says of a request whether it goes.

    Returns:
        The new manifest; None when no request is left, and nothing was written.

    Raises:
        ShardError: the old or the new one breaks a rule of the format.
    """
    old = validate_shard(path)
    with ShardReader(path) as reader:
        kept = [states for states in reader if not drop(states.info)]
    if not kept:
        return None
    made = write_shard(
        folder,
        kept,
        split=Split.TRAIN if old.split == Split.TRAIN.folder else Split.GATE,
        target=old.target,
        opened_at=old.opened_at,
        closed_at=old.closed_at,
        chat_template=old.chat_template,
        engine=old.engine,
    )
    return validate_shard(folder / made.file, expected_target=old.target)


def _check_bytes(path: Path, manifest: Shard) -> None:
    if path.stat().st_size != manifest.size:
        raise ShardError(path.name, "truncated", f"{path.stat().st_size} bytes, manifest says {manifest.size}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != manifest.name:
        raise ShardError(path.name, "wrong_digest", f"sha256 {found}, manifest says {manifest.name}")


def _check_request(name: str, index: int, states: RequestStates, target: TargetContract) -> None:
    for key in ("input_ids", "aux_hidden", "last_hidden"):
        if getattr(states, key).dtype != DTYPES[key]:
            raise ShardError(name, "wrong_dtype", f"{key} is {getattr(states, key).dtype}, not {DTYPES[key]}", index)
    for key, values in (("aux_hidden", states.aux_hidden), ("last_hidden", states.last_hidden)):
        bad = (~torch.isfinite(values).all(dim=-1)).nonzero().flatten()
        if len(bad):
            raise ShardError(name, "non_finite", f"{key} of request {states.info.request}", int(bad[0]))
    ids = torch.cat([states.input_ids, torch.tensor([states.last_token])])
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ShardError(name, "id_out_of_range", f"ids {int(ids.min())}..{int(ids.max())}", index)
    if states.first_row < 0 or states.first_row + states.rows < states.prompt_len:
        raise ShardError(name, "missing_rows", f"rows end before the prompt of {states.prompt_len} tokens does", index)


def semantic_agreement(states: RequestStates, head: torch.Tensor) -> tuple[float, int]:
    """Share of generated tokens that lm_head reproduces greedily, and how many were compared.

    Args:
        head: [V, H] floating point.
    """
    rows = states.generated_rows()
    if not bool(rows.any()):
        return 1.0, 0
    predicted = (states.last_hidden[rows].to(head.dtype) @ head.T).argmax(-1)
    wanted = states.next_ids()[rows]
    return float((predicted == wanted).float().mean()), int(rows.sum())


def _check_meaning(name: str, index: int, states: RequestStates, head: torch.Tensor) -> None:
    if states.info.sampling != "greedy":
        return  # a sampled token need not be the likeliest one
    agreement, compared = semantic_agreement(states, head)
    bar = MIN_SEMANTIC_AGREEMENT if compared >= MIN_SEMANTIC_TOKENS else MIN_SEMANTIC_AGREEMENT / 2
    if compared and agreement < bar:
        detail = f"lm_head reproduces {agreement:.2f} of {compared} generated tokens of {states.info.request}"
        raise ShardError(name, "wrong_states", detail, index)
