"""What share of the traffic's states is captured: little while nothing is asked for, enough in time when it is.

Owns the rule. Knows nothing of the engine that samples, or of why states are wanted.
"""

from __future__ import annotations

import numpy as np

from tide.config import CapturePolicy, Policy
from tide.domain import DraftModel, DriftReport, TargetContract
from tide.states.request_stats import RequestStats

_STATES_A_ROW = 4
"""Of the target's hidden size each: three captured layers and the last."""
_BYTES = 2


def wanted_rate(
    policy: CapturePolicy, *, gather: bool, needed_rows: int, available_rows: int, rows_per_s: float, row_bytes: int
) -> float:
    """Share of requests whose states to capture, 0..1.

    Args:
        gather: the drift gate watches or asks for a draft, or there is none of ours yet.
        needed_rows: training rows of one run, ``train_tokens``.
        available_rows: training rows that are there and were not trained on.
        rows_per_s: rows that the service would write if all its requests were captured.
        row_bytes: of one row, as stored.

    Returns:
        The floor rate; or, to gather, what brings the missing rows within ``gather_time_s``, all of it when the
        traffic is not known yet. Never more than the byte budget allows, even where that is less than the floor.
    """
    missing = max(needed_rows - available_rows, 0)
    rate = policy.floor_rate
    if gather and missing:
        rate = max(rate, missing / (rows_per_s * policy.gather_time_s) if rows_per_s > 0 else 1.0)
    stream = rows_per_s * row_bytes
    allowed = policy.byte_budget_per_s / stream if policy.byte_budget_per_s is not None and stream > 0 else 1.0
    return min(rate, allowed, 1.0)


def after(
    report: DriftReport,
    stats: RequestStats,
    policy: Policy,
    incumbent: DraftModel | None,
    available_rows: int,
    target: TargetContract,
) -> float:
    """The rate that a drift report asks for.

    Args:
        stats: requests that the traffic is measured on.
        available_rows: training rows that are there and were not trained on.
    """
    return wanted_rate(
        policy.capture,
        gather=report.decision != "none" or incumbent is None or incumbent.imported,
        needed_rows=policy.train_tokens,
        available_rows=available_rows,
        rows_per_s=rows_per_s(stats, policy.train.prompt_rows),
        row_bytes=_STATES_A_ROW * _BYTES * target.hidden_size,
    )


def rows_per_s(stats: RequestStats, prompt_rows: int) -> float:
    """Rows a second that capturing every request would write; 0 where fewer than two moments are known.

    Args:
        prompt_rows: rows of a prompt that are kept, at most.
    """
    seconds = float(np.ptp(stats.finished_at)) if len(stats) else 0.0
    rows = float((stats.response_tokens + np.minimum(stats.prompt_tokens, prompt_rows)).sum())
    return rows / seconds if seconds > 0 else 0.0
