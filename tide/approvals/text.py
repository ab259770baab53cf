"""Approvals in words: the text above the form, and the table of what waits. Owns wording, nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tide.approvals.steps import Waiting
from tide.domain import ApprovalRequest, Interval, Verdict
from tide.promotion import verdict_text


def to_markdown(request: ApprovalRequest, verdict: Verdict) -> str:
    """What a reviewer reads before they answer."""
    lines = [
        f"# Serve draft {request.candidate[:12]} in place of {request.incumbent[:12]}?",
        "",
        f"{request.approvers} must approve by {moment(request.expires_at)}; one who refuses is enough. "
        f"Asked because: {'; '.join(request.reasons)}.",
        "",
        f"Signed: `tide approve {request.run} --by NAME --why TEXT`, or `tide refuse`. This form is not signed, and "
        "counts only where policy allows that.",
        "",
        verdict_text.to_markdown(verdict),
    ]
    return "\n".join(lines)


def table(waiting: Sequence[Waiting], now: float) -> str:
    """What waits, a block each."""
    if not waiting:
        return "nothing waits for approval"
    return "\n".join(_block(item, now) for item in waiting)


def moment(at: float) -> str:
    """A time as people read it, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _block(item: Waiting, now: float) -> str:
    request, agreed = item.request, item.approved_by
    over = " (over: will be refused)" if now >= request.expires_at else ""
    lines = [
        f"run {request.run}",
        f"  candidate  {request.candidate[:12]} on {request.branch}, in place of {request.incumbent[:12]}",
        f"  gain       {_interval(request.gain)} in acceptance length",
        f"  since      {moment(request.asked_at)}, until {moment(request.expires_at)}{over}",
        f"  approvals  {len(agreed)} of {request.approvers}{': ' if agreed else ''}{', '.join(agreed)}",
        f"  asked for  {'; '.join(request.reasons)}",
    ]
    lines += [f"  last form  does not count: {'; '.join(item.last_problems)}"] if item.last_problems else []
    return "\n".join(lines)


def _interval(gain: Interval) -> str:
    return f"{gain.estimate:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
