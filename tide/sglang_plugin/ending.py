"""What is written down of a request when it ends: its counters as SGLang has them, its draft, its sampling regime."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tide.sglang_plugin.records import FinishedRequest, OpenRequest


def describe(
    request: OpenRequest,
    req: Any,
    *,
    draft: tuple[str, int],
    draft_tokens: int | None,
    decode: Callable[[list[int]], str] | None,
) -> FinishedRequest:
    """The end of a request.

    Args:
        req: SGLang's Req.
        draft: digest in serving and number of swaps, now.
        draft_tokens: tokens verified in a step; None when that changes while running: proposals are unmeasured then.
        decode: ids -> text; not kept for a request that opted out.
    """
    digest, swaps = draft
    steps = int(req.spec_verify_ct)
    measured = steps > 0 and draft_tokens is not None
    params = req.sampling_params
    greedy = params.top_k == 1
    return FinishedRequest(
        serial=request.serial,
        admission=request.admission,
        ids=[*req.origin_input_ids, *req.output_ids_through_stop],
        prompt_tokens=len(req.origin_input_ids),
        cached_tokens=int(req.cached_tokens),
        started_at=request.started_at,
        finished_at=time.time(),
        verify_steps=steps or None,
        proposed=steps * ((draft_tokens or 1) - 1) if measured else None,
        accepted=int(req.spec_num_correct_drafts) if steps else None,
        # SGLang rewrites temperature 0 to (1, top_k=1).
        temperature=0.0 if greedy else float(params.temperature),
        sampling="greedy" if greedy else "sampled",
        draft=digest if swaps == request.swaps else "mixed",
        finish_reason=_finish_reason(req),
        decode=None if request.admission.opted_out else decode,
    )


def _finish_reason(req: Any) -> str:
    reason = req.finished_reason
    return "abort" if reason is None else str(reason.to_json().get("type", "unknown"))
