"""The evaluator for EAGLE3 drafts: drafting over logged states and the verify-step walk that serving does.

Owns which requests are walked, and the scores. Knows nothing of stores, of the other draft, or of thresholds; requests
are walked together in ``walker``, the counting is in ``acceptance``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import torch

from tide.acceptance import Walk
from tide.domain import DraftContract, EvalReport, RequestScore, Shard, Split, TargetContract, split_of
from tide.errors import ContractMismatch, EvaluationError
from tide.evaluator.base import Evaluator
from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.target import SampledTarget
from tide.evaluator.tree import TreeShape
from tide.evaluator.walker import OpenRequest, Walker
from tide.models.draft_files import DraftFiles, load_draft
from tide.models.target_files import bundle_contract, head_keys, load_tensor
from tide.states.shards import RequestStates, ShardReader


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
        draft_tokens: int | None = None,
        temperature: float = 0.0,
        states_commit: str = "",
    ) -> EvalReport:
        """See Evaluator.evaluate. Requests of the other regime, or too short for a verify step, are left out.

        Above temperature 0 the chance of each proposal is the target's, softmax(lm_head / temperature) of the logged
        row: SGLang verifies against the target alone (``tree_speculative_sampling_target_only``: a child is accepted
        with the target's probability of it), its proposals do not depend on the temperature. Assumed: top-p, top-k,
        min-p and penalties off, acceptance thresholds at 1, no rejection sampling from the draft
        (``--speculative-use-rejection-sampling``). SGLang's CPU engine does none of this: it commits the likeliest
        token at any temperature.

        Raises:
            EvaluationError: also for a training conversation among the held-out ones, and one request that stands in
                two shards.
        """
        walk = _Prepared.of(draft, bundle, steps, topk, draft_tokens, temperature)
        files, contract, shape = walk.files, walk.target, walk.shape
        with torch.inference_mode():
            requests = _requests(shards, contract, split, sampled=temperature > 0)
            # No request outlives its walk: its rows are what memory goes to.
            scored = [(score_of(request, done, shape), request.info.sampling) for request, done in walk.over(requests)]
        scored = [(score, sampling) for score, sampling in scored if score.verify_steps]
        if not scored:
            raise EvaluationError(_nothing(len(shards), split, temperature))
        return EvalReport(
            draft=files.digest,
            contract=files.contract,
            target=contract,
            states_commit=states_commit,
            steps=steps,
            topk=topk,
            draft_tokens=shape.draft_tokens if topk > 1 else None,
            sampling=regime_of({sampling for _, sampling in scored}, temperature),
            scores=tuple(score for score, _ in scored),
        )

    def walk(
        self,
        draft: Path,
        shards: Sequence[Path],
        requests: AbstractSet[str],
        *,
        bundle: Path,
        steps: int,
        topk: int = 1,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> list[RequestScore]:
        """See Evaluator.walk."""
        walk = _Prepared.of(draft, bundle, steps, topk, draft_tokens, temperature)
        with torch.inference_mode():
            named = _named(shards, walk.target, requests)
            scores = [score_of(request, done, walk.shape) for request, done in walk.over(named)]
        return [score for score in scores if score.verify_steps]


@dataclass(frozen=True)
class _Prepared:
    """A draft ready to walk: loaded, and of the bundle's target."""

    files: DraftFiles
    target: TargetContract
    shape: TreeShape
    _walker: Walker

    @classmethod
    def of(
        cls, draft: Path, bundle: Path, steps: int, topk: int, draft_tokens: int | None, temperature: float
    ) -> _Prepared:
        """Raises DraftError, ContractMismatch, EvaluationError."""
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise EvaluationError(f"temperature is {temperature}; 0 for greedy decoding, or what sampling divides by")
        files, contract = load_draft(draft), bundle_contract(bundle)
        _check_identity(draft, files, contract)
        shape = TreeShape.of(steps, topk, draft_tokens, files.contract.draft_vocab_size)
        embedding, head = head_keys(bundle)
        module = Eagle3Draft(files, load_tensor(bundle, embedding))
        target = SampledTarget(load_tensor(bundle, head)[: contract.vocab_size], temperature) if temperature else None
        return cls(files, contract, shape, Walker(module, shape, target))

    def over(self, requests: Iterable[RequestStates]) -> Iterator[tuple[OpenRequest, Walk]]:
        """Every request and its walk, in order."""
        return self._walker.walk(requests)


def regime_of(sampling: AbstractSet[str], temperature: float) -> str:
    """What a report calls the regime of its requests; two temperatures never share a name."""
    if temperature:
        short = f"{temperature:.2f}"
        return f"temperature {short if float(short) == temperature else repr(float(temperature))}"
    return "greedy" if sampling == {"greedy"} else "unknown"


def score_of(request: OpenRequest, walk: Walk, shape: TreeShape) -> RequestScore:
    """What serving this request with this draft would have counted.

    The tokens beyond the answer's end are not known: proposals for them are not counted as accepted.
    """
    return RequestScore(
        request=request.info.request,
        conversation=request.info.conversation,
        slice=request.info.slice,
        tokens=walk.tokens,
        verify_steps=walk.verify_steps,
        proposed=walk.verify_steps * (shape.draft_tokens - 1),
        accepted=walk.accepted,
        prompt_tokens=request.prompt_tokens,
        accepted_at=walk.accepted_at,
    )


def score_request(
    draft: Eagle3Draft, states: RequestStates, steps: int, topk: int = 1, draft_tokens: int | None = None
) -> RequestScore:
    """One request walked alone, greedily; see ``score_of``."""
    shape = TreeShape.of(steps, topk, draft_tokens, draft.contract.draft_vocab_size)
    ((request, walk),) = Walker(draft, shape).walk([states])
    return score_of(request, walk, shape)


def _requests(
    shards: Sequence[Path], target: TargetContract, split: Split, *, sampled: bool
) -> Iterator[RequestStates]:
    """The requests of one split and regime, shard by shard; every manifest is checked before its rows are read."""
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
                if split_of(info.conversation) is split and (info.sampling == "sampled") == sampled:
                    yield reader.request(index)


def _named(shards: Sequence[Path], target: TargetContract, wanted: AbstractSet[str]) -> Iterator[RequestStates]:
    """The requests of these names with most of their prompt, each once."""
    left = set(wanted)
    for path in shards:
        with ShardReader(path) as reader:
            _check_target(path, reader.manifest, target)
            for index, info in enumerate(reader.manifest.requests):
                if info.request in left:
                    left.remove(info.request)
                    states = reader.request(index)
                    if 2 * states.first_row <= states.prompt_len:
                        yield states


def _check_target(path: Path, manifest: Shard, target: TargetContract) -> None:
    if parts := target.differences(manifest.target):
        raise ContractMismatch(f"bundle and shard {path.name}: target", parts)


def _check_shard(path: Path, manifest: Shard, target: TargetContract) -> None:
    _check_target(path, manifest, target)
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


def _nothing(shards: int, split: Split, temperature: float) -> str:
    kind = "sampled" if temperature else "greedy"
    detail = f"{shards} shards hold no {kind} request of the {split} split with a verify step"
    return f"nothing to walk: {detail}; serve more traffic and harvest it"
