"""The shard: one safetensors file of many requests end to end, and the manifest that makes it exist.

Owns the format: writing, streaming, and that what is read has its layout. Whether the content is right is shard_checks'
business. Knows nothing of stores, spools or engines.

Tensors, for R requests with N rows in all, H the target's hidden size:

    input_ids    [N]    int32   the token id at each row's position
    last_token   [R]    int32   the token that follows a request's last row: generated, but never run through the target
    first_row    [R]    int32   absolute position of the first row kept (prompts may be trimmed at the front)
    aux_hidden   [N,3H] bf16    outputs of the three captured layers, low | mid | high
    last_hidden  [N,H]  bf16    after the final norm: what lm_head reads
    offsets      [R+1]  int64   row range of request r is offsets[r]:offsets[r+1]
    prompt_lens  [R]    int32   tokens of the prompt, trimmed ones included
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tide.domain import Shard, ShardRequest, Split, TargetContract
from tide.errors import ShardError
from tide.files import write_durably

DTYPES: dict[str, torch.dtype] = {
    "input_ids": torch.int32,
    "last_token": torch.int32,
    "first_row": torch.int32,
    "aux_hidden": torch.bfloat16,
    "last_hidden": torch.bfloat16,
    "offsets": torch.int64,
    "prompt_lens": torch.int32,
}


@dataclass(frozen=True)
class RequestStates:
    """The rows of one request. Row i is absolute position ``first_row + i`` of prompt + answer."""

    info: ShardRequest
    input_ids: torch.Tensor
    """[n] int32"""
    last_token: int
    first_row: int
    prompt_len: int
    aux_hidden: torch.Tensor
    """[n, 3H] bfloat16"""
    last_hidden: torch.Tensor
    """[n, H] bfloat16"""

    @property
    def rows(self) -> int:
        """Number of rows kept."""
        return int(self.input_ids.shape[0])

    def next_ids(self) -> torch.Tensor:
        """[n] int32: the id that follows each row."""
        return torch.cat([self.input_ids[1:], torch.tensor([self.last_token], dtype=torch.int32)])

    def generated_rows(self) -> torch.Tensor:
        """[n] bool: rows whose NEXT token was generated (position >= prompt_len - 1)."""
        return torch.arange(self.rows) + self.first_row >= self.prompt_len - 1


def write_shard(
    folder: Path,
    states: Sequence[RequestStates],
    *,
    split: Split,
    target: TargetContract,
    opened_at: float,
    closed_at: float,
    chat_template: str = "",
    engine: str = "",
) -> Shard:
    """Write one shard and then its manifest; a crash in between leaves nothing that readers see.

    Args:
        folder: where ``<sha256>.safetensors`` and ``<sha256>.json`` go; made when missing.
        states: requests in row order; at least one.
        opened_at, closed_at: seconds since the epoch.

    Raises:
        ValueError: no states.
        OSError: the disk refused; nothing with a manifest was left.
    """
    if not states:
        raise ValueError("a shard needs at least one request")
    # One key only: safetensors writes several in random order, and the same rows must give the same digest.
    payload = save(_tensors(states), metadata={"tide.identity": _identity(states, target)})
    shard = Shard(
        name=hashlib.sha256(payload).hexdigest(),
        split=split.folder,
        target=target,
        rows=sum(s.rows for s in states),
        size=len(payload),
        requests=tuple(s.info for s in states),
        opened_at=opened_at,
        closed_at=closed_at,
        chat_template=chat_template,
        engine=engine,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / shard.file, payload)
    write_durably(folder / f"{shard.name}.json", shard.to_json().encode())
    return shard


def _identity(states: Sequence[RequestStates], target: TargetContract) -> str:
    """Digest of whose rows these are, so that equal tensors of different requests never share a name."""
    parts = [target.to_json(), *(s.info.to_json() for s in states)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _tensors(states: Sequence[RequestStates]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0, *(s.rows for s in states)], dtype=torch.int64)
    return {
        "input_ids": torch.cat([s.input_ids for s in states]).to(torch.int32),
        "last_token": torch.tensor([s.last_token for s in states], dtype=torch.int32),
        "first_row": torch.tensor([s.first_row for s in states], dtype=torch.int32),
        "aux_hidden": torch.cat([s.aux_hidden for s in states]).to(torch.bfloat16).contiguous(),
        "last_hidden": torch.cat([s.last_hidden for s in states]).to(torch.bfloat16).contiguous(),
        "offsets": lengths.cumsum(0),
        "prompt_lens": torch.tensor([s.prompt_len for s in states], dtype=torch.int32),
    }


def read_manifest(path: Path) -> Shard:
    """Manifest of a shard, given the shard's or the manifest's path.

    Raises:
        ShardError: ``no_manifest`` or ``bad_manifest``.
    """
    manifest = path.with_suffix(".json")
    try:
        return Shard.model_validate_json(manifest.read_bytes())
    except FileNotFoundError as error:
        raise ShardError(
            path.name, "no_manifest", f"{manifest} does not exist, so the shard does not either"
        ) from error
    except ValidationError as error:
        raise ShardError(path.name, "bad_manifest", str(error).replace("\n", " ")[:400]) from error


class ShardReader:
    """Streams the requests of one shard; memory is bounded by its largest request.

    Use as a context manager and iterate::

        with ShardReader(path) as reader:
            for states in reader: ...

    Raises:
        ShardError: ``no_manifest``, ``bad_manifest``, ``truncated`` or a broken rule of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)

    def __enter__(self) -> ShardReader:
        try:
            self._file: Any = safe_open(str(self.path), framework="pt")
            self._file.__enter__()  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ShardError(self.path.name, "truncated", f"cannot be read: {error}") from error
        self._heads()
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)

    def __len__(self) -> int:
        return len(self.manifest.requests)

    def __iter__(self) -> Iterator[RequestStates]:
        for index in range(len(self)):
            yield self.request(index)

    def request(self, index: int) -> RequestStates:
        """Rows of the index-th request."""
        low, high = int(self._offsets[index]), int(self._offsets[index + 1])
        return RequestStates(
            info=self.manifest.requests[index],
            input_ids=self._file.get_slice("input_ids")[low:high],
            last_token=int(self._last_token[index]),
            first_row=int(self._first_row[index]),
            prompt_len=int(self._prompt_lens[index]),
            aux_hidden=self._file.get_slice("aux_hidden")[low:high],
            last_hidden=self._file.get_slice("last_hidden")[low:high],
        )

    def _heads(self) -> None:
        _check_layout(self.path.name, self._file, self.manifest)
        self._offsets = self._file.get_tensor("offsets")
        self._last_token = self._file.get_tensor("last_token")
        self._first_row = self._file.get_tensor("first_row")
        self._prompt_lens = self._file.get_tensor("prompt_lens")
        _check_offsets(self.path.name, self._offsets, self.manifest)


def _check_layout(name: str, file: Any, manifest: Shard) -> None:
    missing = sorted(set(DTYPES) - set(file.keys()))
    if missing:
        raise ShardError(name, "missing_tensor", f"{', '.join(missing)} not in the file")
    rows, requests, hidden = manifest.rows, len(manifest.requests), manifest.target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_ids": (rows,),
        "last_token": (requests,),
        "first_row": (requests,),
        "aux_hidden": (rows, 3 * hidden),
        "last_hidden": (rows, hidden),
        "offsets": (requests + 1,),
        "prompt_lens": (requests,),
    }
    for key, expected in shapes.items():
        found = tuple(file.get_slice(key).get_shape())
        if found != expected:
            rule = "wrong_width" if found[:1] == expected[:1] else "wrong_length"
            raise ShardError(name, rule, f"{key} has shape {found}, expected {expected}")


def _check_offsets(name: str, offsets: torch.Tensor, manifest: Shard) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != manifest.rows:
        raise ShardError(
            name, "bad_offsets", f"offsets run {int(offsets[0])}..{int(offsets[-1])}, rows {manifest.rows}"
        )
    backwards = (offsets[1:] <= offsets[:-1]).nonzero().flatten()
    if len(backwards):
        raise ShardError(name, "bad_offsets", "offsets are not increasing", int(backwards[0]))
