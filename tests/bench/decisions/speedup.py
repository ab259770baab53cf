"""Predicted against measured speedup, by condition: the offline acceptance length and the engine's profile predict.

Owns how a condition that ``speed.py`` collected meets its walk. Knows nothing of how either was made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.bench.decisions import corpus
from tests.bench.decisions.corpus import Scores
from tide.acceptance import expected_length
from tide.domain import EngineProfile
from tide.throughput.prediction import predict


def speed_figures(walk: Mapping[str, Scores]) -> dict[str, Any]:
    """The figures of all conditions; None where nothing was collected."""
    files = [corpus.DATA / name for name in ("speed.json", "profile.json")]
    if missing := [file.name for file in files if not file.exists()]:
        return {"speedup_error": None, "speedup_missing": f"no {' and no '.join(missing)}: run speed.py"}
    rows, profile = json.loads(files[0].read_text()), EngineProfile.model_validate_json(files[1].read_text())
    found = speed(walk, rows, profile)
    offline = [f for f in found if "error" in f]
    same = [f["error"] for f in offline if f["steps"] == f["walk_steps"]]
    other = [f["error"] for f in offline if f["steps"] != f["walk_steps"]]
    return {
        "speedup_error": max(same, default=None),
        "speedup_error_median": float(np.median(same)) if same else None,
        "speedup_error_from_live": max((f["error_from_live"] for f in found), default=None),
        "speedup_error_other_steps": max(other, default=None),
        "speedup_conditions": len(same),
        "speedup": found,
        "profile": profile.model_dump(mode="json", exclude={"target"}),
    }


def at_steps(length: float, measured: int, wanted: int) -> float:
    """Acceptance length at another number of draft steps, from the per-token rate that explains the measured one."""
    if measured == wanted:
        return length
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, measured) < length else (low, middle)
    return expected_length(low, wanted)


def speed(walk: Mapping[str, Scores], rows: list[dict[str, Any]], profile: EngineProfile) -> list[dict[str, Any]]:
    """Predicted and measured speedup of every condition."""
    return [_predicted(row, walk.get(row["draft"]), profile) for row in rows]


def _predicted(row: dict[str, Any], walk: Scores | None, profile: EngineProfile) -> dict[str, Any]:
    own, of = _offline(row, walk)
    steps = int(row.get("steps", 3))
    measured = row.get("speedup", row["spec_tok_s"] / row["plain_tok_s"])
    found: dict[str, Any] = {key: row[key] for key in ("draft", "workload", "concurrency")} | {"steps": steps}
    found |= {"measured": measured, "live_length": row["acceptance_length"], "walked_requests": of}
    lengths = {"from_live": float(row["acceptance_length"])}
    if own is not None:
        found |= {"walk_steps": draft_steps(own)}
        lengths["predicted"] = found["offline_length"] = at_steps(pooled(own), draft_steps(own), steps)
    load = {int(b): share for b, share in (row.get("histogram") or {row["concurrency"]: 1.0}).items()}
    for name, length in lengths.items():
        found[name] = predict(
            profile,
            length,
            steps=steps,
            concurrency=load,
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
        )
    if own is not None:
        found["error"] = abs(found["predicted"] / measured - 1)
    return found | {"error_from_live": abs(found["from_live"] / measured - 1)}


def _offline(row: dict[str, Any], walk: Scores | None) -> tuple[Scores | None, str]:
    """The walk of the very requests where the corpus has them, else of the workload; and which of both."""
    if walk is None:
        return None, "none"
    workload = walk.take((walk.workload == row["workload"]) & (walk.verify_steps > 0))
    place = {name: at for at, name in enumerate(workload.request.tolist())}
    # A request that was served in two repeats counts twice, as it does in the measured rate.
    same = [place[name] for name in row.get("requests", ()) if name in place]
    if same:
        return workload.take(np.array(same)), "same"
    return (workload, "workload") if len(workload) else (None, "none")


def pooled(scores: Scores) -> float:
    """Acceptance length: tokens over verify steps, summed before dividing."""
    return float(scores.tokens.sum() / scores.verify_steps.sum())


def draft_steps(scores: Scores) -> int:
    """Draft steps that rows were made at; a walk may cut the last proposals of an answer."""
    return math.ceil(round(float(scores.proposed.sum() / scores.verify_steps.sum()), 6))
