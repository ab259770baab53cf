"""The evaluator for EAGLE3 drafts: chain drafting over logged states and the verify-step walk that serving does.

Owns which requests are walked, and the scores. Knows nothing of stores, of the other draft, or of thresholds; the
forward pass is in ``draft_module``, the counting in ``acceptance``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tide.acceptance import Ints, walk
from tide.domain import DraftContract, EvalReport, RequestScore, Shard, Split, TargetContract, split_of
from tide.draft_files import DraftFiles, load_draft
from tide.errors import ContractMismatch, EvaluationError
from tide.evaluator.base import Evaluator
from tide.evaluator.draft_module import Chain, Eagle3Draft
from tide.shards import RequestStates, ShardReader
from tide.target_files import bundle_contract, head_keys, load_tensor

MAX_SCORES = 32_000_000
"""Attention scores held at once (float32): anchors are drafted in blocks, so that long requests stay in memory."""


class Eagle3Evaluator(Evaluator):
    """Walks EAGLE3 drafts on the CPU, in float32."""

    def evaluate(
        self,
        draft: Path,
        shards: Sequence[Path],
        *,
        bundle: Path,
        split: Split,
        steps: int,
        topk: int = 1,
        states_commit: str = "",
    ) -> EvalReport:
        """See Evaluator.evaluate. Requests that were sampled, or too short for a verify step, are left out.

        Raises:
            EvaluationError: also for trees (topk above 1), no draft steps, a training conversation among the held-out
                ones, and one request that stands in two shards.
        """
        if steps < 1 or topk != 1:
            raise EvaluationError(
                f"cannot walk {steps} draft steps with topk {topk}: chains (topk 1) of at least 1 step"
            )
        files, target = load_draft(draft), bundle_contract(bundle)
        _check_identity(draft, files, target)
        module = Eagle3Draft(files, load_tensor(bundle, head_keys(bundle)[0]))
        scores, regimes = [], set()
        with torch.inference_mode():
            for states in _requests(shards, target, split):
                if states.info.sampling != "sampled" and (score := score_request(module, states, steps)).verify_steps:
                    scores.append(score)
                    regimes.add(states.info.sampling)
        _check_scores(scores, shards, split)
        return EvalReport(
            draft=files.digest,
            contract=files.contract,
            target=target,
            states_commit=states_commit,
            steps=steps,
            topk=topk,
            sampling="greedy" if regimes == {"greedy"} else "unknown",
            scores=tuple(scores),
        )


def score_request(draft: Eagle3Draft, states: RequestStates, steps: int) -> RequestScore:
    """What serving this request with this draft would have counted.

    The tokens beyond the answer's end are not known: proposals for them are not counted as accepted.
    """
    counted = walk(right_proposals(draft, states, steps))
    return RequestScore(
        request=states.info.request,
        conversation=states.info.conversation,
        slice=states.info.slice,
        tokens=counted.tokens,
        verify_steps=counted.verify_steps,
        proposed=counted.verify_steps * steps,
        accepted=counted.accepted,
    )


def right_proposals(draft: Eagle3Draft, states: RequestStates, steps: int) -> Ints:
    """[G - 1] leading right proposals when the newest known token is generated token i; see ``acceptance.walk``.

    All anchors are drafted at once; one that was wrong needs no further step, as nothing behind it can count.
    """
    ids = torch.cat([states.input_ids, torch.tensor([states.last_token], dtype=torch.int32)]).long()
    first = max(states.prompt_len - 1 - states.first_row, 0)
    usable = states.rows - 1  # behind the newest token of the last row nothing is left to propose
    correct = torch.zeros(max(usable - first, 0), dtype=torch.int64)
    if len(correct):
        prefix = draft.prefix(states.aux_hidden[:usable], ids[1 : usable + 1])
        block = max(1, MAX_SCORES // (usable * draft.contract.num_attention_heads))
        for start in range(first, usable, block):
            anchors = torch.arange(start, min(start + block, usable))
            _draft_block(Chain(draft, prefix, anchors), ids, correct, first, steps)
    found: Ints = correct.numpy().astype(np.int64)
    return found


def _draft_block(chain: Chain, ids: torch.Tensor, correct: torch.Tensor, first: int, steps: int) -> None:
    for depth in range(steps):
        proposed = chain.proposals()
        right = proposed == ids[chain.anchors + 2 + depth]
        correct[chain.anchors[right] - first] += 1
        alive = right & (chain.anchors + 3 + depth < len(ids))
        if depth + 1 == steps or not bool(alive.any()):
            return
        chain.keep(alive)
        chain.advance(proposed[alive])


def _requests(shards: Sequence[Path], target: TargetContract, split: Split) -> Iterator[RequestStates]:
    """The requests of one split, shard by shard; every manifest is checked before its rows are read."""
    seen: set[str] = set()
    for path in shards:
        with ShardReader(path) as reader:
            _check_shard(path, reader.manifest, target)
            for index, info in enumerate(reader.manifest.requests):
                if info.request in seen:
                    raise EvaluationError(
                        f"request {info.request} stands twice, in {path.name} again: leave out one shard"
                    )
                seen.add(info.request)
                if split_of(info.conversation) is split:
                    yield reader.request(index)


def _check_shard(path: Path, manifest: Shard, target: TargetContract) -> None:
    if parts := target.differences(manifest.target):
        raise ContractMismatch(f"bundle and shard {path.name}: target", parts)
    if manifest.split != Split.GATE.folder:
        raise EvaluationError(f"shard {path.name} is of the {manifest.split} split: the draft may have learnt it")
    for info in manifest.requests:
        if split_of(info.conversation) is Split.TRAIN:
            raise EvaluationError(
                f"shard {path.name}: conversation {info.conversation} of {info.request} is for training"
            )


def _check_identity(folder: Path, files: DraftFiles, target: TargetContract) -> None:
    own: DraftContract = files.contract
    pairs = {
        "hidden_size": (target.hidden_size, own.target_hidden_size),
        "vocab_size": (target.vocab_size, own.vocab_size),
        "aux_layers": (target.aux_layers, own.aux_layers),
    }
    parts = tuple(f"{name}: {theirs} != {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours)
    if files.record is not None:
        parts += target.differences(files.record.target)
    if parts:
        raise ContractMismatch(f"bundle and draft {folder.name}: target", parts)


def _check_scores(scores: Sequence[RequestScore], shards: Sequence[Path], split: Split) -> None:
    if not scores:
        detail = f"{len(shards)} shards hold no greedy request of the {split} split with a verify step"
        raise EvaluationError(f"nothing to walk: {detail}; serve more traffic and harvest it")
