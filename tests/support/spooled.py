"""Spools filled with small real shards and request segments, for tests of the harvest.

The tiny target has 32 hidden units and an identity-like head, so that the semantic check has something to say.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.spool_shape import HIDDEN, START, TARGET, VOCAB, WINDOW_S
from tide.domain import RequestSegment, Shard, ShardRequest, Split, TargetContract
from tide.states.harvest import Harvester
from tide.states.requests import request_row, write_segment
from tide.states.shards import RequestStates, write_shard
from tide.store.base import Store

__all__ = ["HIDDEN", "START", "TARGET", "VOCAB", "WINDOW_S"]
HEAD = torch.eye(VOCAB, HIDDEN)


def states(seed: int, rows: int = 24, prompt: int = 8, draft: str = "d" * 64) -> RequestStates:
    """One greedy request whose last hidden states name the next token exactly."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows + 1,), generator=generator, dtype=torch.int32)
    info = ShardRequest(
        request=f"{seed:064x}", conversation=f"{seed:08x}", slice="chat", draft=draft, sampling="greedy"
    )
    return RequestStates(
        info=info,
        input_ids=ids[:-1],
        last_token=int(ids[-1]),
        first_row=0,
        prompt_len=prompt,
        aux_hidden=torch.randn((rows, 3 * HIDDEN), generator=generator).to(torch.bfloat16),
        last_hidden=torch.nn.functional.one_hot(ids[1:].long(), HIDDEN).to(torch.bfloat16),
    )


def add_shard(
    spool: Path,
    *seeds: int,
    at: float = START + 10,
    split: Split = Split.TRAIN,
    target: TargetContract = TARGET,
) -> Shard:
    """A shard of these requests, closed at a moment."""
    return write_shard(
        spool / split.folder,
        [states(seed) for seed in seeds],
        split=split,
        target=target,
        opened_at=at - 5,
        closed_at=at,
        engine="sglang 0.5.23",
    )


def add_segment(
    spool: Path, *seeds: int, at: float = START + 10, target: TargetContract = TARGET, dropped: int = 0
) -> RequestSegment:
    """A piece of the request table with one row a request."""
    rows = [
        request_row(
            f"{seed:064x}",
            at - 2,
            at - 1,
            conversation=f"{seed:08x}",
            response_tokens=16,
            verify_steps=8,
            accepted=8,
            proposed=24,
            draft="d" * 64,
        )
        for seed in seeds
    ]
    counts = {"queue_full": dropped} if dropped else {}
    return write_segment(
        spool / "requests", rows, target=target, opened_at=at - 5, closed_at=at, dropped=counts, excluded={"sampled": 1}
    )


def harvester_of(store: Store, spool: Path, repository: str, replica: str = "r0") -> Harvester:
    """A harvester of these windows that expects this target and its head."""
    return Harvester(
        store=store,
        spool=spool,
        repository=repository,
        replica=replica,
        window_s=WINDOW_S,
        expected_target=TARGET,
        head=HEAD,
    )


def full_spool(spool: Path) -> None:
    """Two closed windows with good files of all kinds, one bad shard and one bad segment, and one open window."""
    add_shard(spool, 1, 2)
    add_shard(spool, 3, split=Split.GATE)
    add_segment(spool, 1, 2, dropped=4)
    add_segment(spool, 3, at=START + 20)
    add_shard(spool, 4, at=START + WINDOW_S + 1)
    add_segment(spool, 4, at=START + WINDOW_S + 2)
    bad = add_shard(spool, 5, at=START + WINDOW_S + 3)
    truncate(spool / "train" / bad.file)
    piece = add_segment(spool, 6, at=START + WINDOW_S + 4)
    truncate(spool / "requests" / piece.file)
    add_shard(spool, 7, at=START + 2 * WINDOW_S + 1)


def truncate(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
