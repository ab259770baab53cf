"""What SGLang's answers mean: JSON of its routes as records of the engine port.

Owns the names of fields in those answers. Knows nothing of connections, and never asks anything itself.
"""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import ValidationError

from tide.domain import DraftContract, TargetContract
from tide.engine.base import EngineFacts, Generation, Speculation
from tide.errors import EngineError


def read_facts(name: str, info: dict[str, Any], tide: dict[str, Any]) -> EngineFacts:
    """Facts of a replica.

    Args:
        name: of the replica, for the error.
        info: answer of ``/server_info``.
        tide: the plugin's part of it.

    Raises:
        EngineError: the plugin is of another version.
    """
    contract, target = tide.get("draft_contract"), tide.get("target")
    decoding = read_speculation(info)
    try:
        return EngineFacts(
            engine=decoding.engine,
            target=None if target is None else TargetContract.model_validate(target),
            draft=tide["draft"],
            draft_contract=None if contract is None else DraftContract.model_validate(contract),
            speculative_steps=decoding.steps,
            speculative_topk=decoding.topk,
            draft_tokens=decoding.draft_tokens,
            capture=tide.get("capture") or {},
        )
    except (KeyError, ValidationError) as error:
        raise EngineError(f"{name}: the plugin's state is not of this version of tide: {error}") from error


def read_speculation(info: dict[str, Any]) -> Speculation:
    """How a server decodes, from its answer of ``/server_info``."""
    return Speculation(
        engine=f"sglang {info.get('version', 'unknown')}",
        speculative=bool(info.get("speculative_algorithm")),
        steps=info.get("speculative_num_steps") or 0,
        topk=info.get("speculative_eagle_topk") or 0,
        draft_tokens=info.get("speculative_num_draft_tokens") or 0,
    )


def read_reason(response: httpx.Response) -> str:
    """What the server says is wrong, wherever in its answer it says it."""
    try:
        answer = response.json()
    except ValueError:
        return response.text[:500]
    if not isinstance(answer, dict):
        return str(answer)[:500]
    nested = answer.get("error")
    message = answer.get("message") or (nested.get("message") if isinstance(nested, dict) else nested)
    return str(message or answer)[:2000]


def read_generation(answer: dict[str, Any], latency_s: float) -> Generation:
    """One answer of ``/v1/chat/completions`` with ``return_meta_info``.

    Args:
        latency_s: from asking to the whole answer, seconds.

    Raises:
        EngineError: it lacks the counters.
    """
    try:
        choice = answer["choices"][0]
        meta = choice["meta_info"]
        return Generation(
            request=meta["id"],
            text=choice["message"].get("content") or "",
            output_ids=_output_ids(answer),
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
            cached_tokens=meta.get("cached_tokens") or 0,
            verify_steps=meta.get("spec_verify_ct"),
            proposed=meta.get("spec_num_proposed_drafts"),
            accepted=meta.get("spec_num_correct_drafts"),
            finish_reason=choice.get("finish_reason") or "",
            latency_s=latency_s,
        )
    except (KeyError, IndexError, TypeError, ValidationError) as error:
        raise EngineError(f"an answer without meta_info: is this SGLang? ({error!r})") from error


def _output_ids(answer: dict[str, Any]) -> tuple[int, ...]:
    ids = (answer.get("sglext") or {}).get("output_ids") or []
    return tuple(ids[0] if ids and isinstance(ids[0], list) else ids)
