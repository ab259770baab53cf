"""Made-up evaluation reports with known gains, for tests of the promotion rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tide.domain import EvalReport, RequestScore, TargetContract

TARGET = TargetContract(
    weights="a" * 64, tokenizer="b" * 64, dtype="bfloat16", hidden_size=8, vocab_size=50, aux_layers=(1, 2, 3)
)
CANDIDATE, INCUMBENT = "c" * 64, "e" * 64


def report(draft: str, scores: Sequence[RequestScore], **changes: object) -> EvalReport:
    """A report of these scores; ``changes`` replace fields."""
    fields: dict[str, object] = {
        "draft": draft,
        "contract": None,
        "target": TARGET,
        "states_commit": "commit",
        "steps": 3,
        "sampling": "greedy",
        "scores": tuple(scores),
    }
    return EvalReport.model_validate(fields | changes)


def score(
    request: str, tokens: int, verify_steps: int, slice: str = "chat", conversation: str | None = None
) -> RequestScore:
    """One request; its conversation is its own unless given."""
    return RequestScore(
        request=request,
        conversation=conversation or f"conversation-{request}",
        slice=slice,
        tokens=tokens,
        verify_steps=verify_steps,
        proposed=3 * verify_steps,
        accepted=max(tokens - verify_steps, 0),
    )


def paired_reports(
    gains: Mapping[str, float], count: int, *, seed: int = 0, spread: float = 0.25, length: float = 1.6
) -> tuple[EvalReport, EvalReport]:
    """(candidate, incumbent) on ``count`` requests of each slice, with a true gain in acceptance length for each.

    Every answer has 240 tokens, so that rounding to whole verify steps is small.
    """
    rng = np.random.default_rng(seed)
    ours, theirs = [], []
    for name, gain in gains.items():
        for index in range(count):
            base = max(rng.normal(length, 0.3), 1.05)
            better = min(max(base + gain + rng.normal(0, spread), 1.0), 4.0)
            request = f"{name}-{index}"
            ours.append(score(request, 240, round(240 / better), name))
            theirs.append(score(request, 240, round(240 / base), name))
    return report(CANDIDATE, ours), report(INCUMBENT, theirs)
