"""Evaluation reports and trained drafts made of corpus rows, as the gates take them.

Owns how a row becomes a record. Knows nothing of what is decided on it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.decisions import corpus
from tests.bench.decisions.corpus import Scores
from tests.support.reports import TARGET
from tide.domain import EvalReport, RequestScore

Ints = npt.NDArray[np.int64]

MIN_CONVERSATIONS = 60
"""A workload with fewer says nothing."""


def digest_of(name: str) -> str:
    """A digest for a draft's name."""
    return hashlib.sha256(name.encode()).hexdigest()


def acceptance_length(scores: Scores, rows: Any = slice(None)) -> float:
    """Pooled over some requests."""
    return float(scores.tokens[rows].sum() / max(scores.verify_steps[rows].sum(), 1))


def report_of(name: str, scores: Scores, rows: Ints, commit: str, ids: Ints | None = None) -> EvalReport:
    """One draft on some requests.

    Args:
        rows: [n] which requests.
        ids: [n] numbers that tell one request from the next where rows are drawn more than once; conversations are as
            many. None: the corpus' own names.
    """
    columns = zip(
        scores.request[rows] if ids is None else ids,
        scores.conversation[rows] if ids is None else ids,
        scores.slice[rows],
        scores.tokens[rows],
        scores.verify_steps[rows],
        scores.proposed[rows],
        scores.accepted[rows],
        strict=True,
    )
    made = tuple(
        # Not validated: some hundred thousand are made, of values that are known.
        RequestScore.model_construct(
            request=str(request),
            conversation=str(conversation),
            slice=str(slice_),
            tokens=int(tokens),
            verify_steps=int(steps),
            proposed=int(proposed),
            accepted=int(accepted),
        )
        for request, conversation, slice_, tokens, steps, proposed, accepted in columns
    )
    return EvalReport(
        draft=digest_of(name),
        contract=None,
        target=TARGET,
        states_commit=commit,
        steps=draft_steps(scores),
        scores=made,
    )


def draft_steps(scores: Scores) -> int:
    """Draft tokens proposed in a verify step."""
    return max(round(float(scores.proposed.sum() / scores.verify_steps.sum())), 1)


def load(source: str = "walk") -> tuple[dict[str, Scores], dict[str, str]]:
    """Scores by draft on the requests that all drafts were scored on, and the workload that each was trained on.

    Drafts whose workload is too small, or not in the corpus, are kept without an entry in the second.
    """
    scores = corpus.load_scores(source)
    shared = sorted(set.intersection(*(set(s.request.tolist()) for s in scores.values())))
    scores = {name: s.take(np.isin(s.request, shared)) for name, s in scores.items()}
    any_draft = next(iter(scores.values()))
    large = {str(w) for w in np.unique(any_draft.workload) if conversations(any_draft, str(w)) >= MIN_CONVERSATIONS}
    known: Mapping[str, Any] = json.loads((corpus.DATA / "drafts.json").read_text())
    trained = {name: str(known[name]["trained_on"]) for name in scores if name in known}
    return scores, {name: workload for name, workload in trained.items() if workload in large}


def conversations(scores: Scores, workload: str) -> int:
    """How many there are of a workload."""
    return len(np.unique(scores.conversation[scores.workload == workload]))


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a rate (Wilson, 1927)."""
    if not trials:
        return 0.0, 1.0
    rate, square = hits / trials, z * z / trials
    middle = (rate + square / 2) / (1 + square)
    reach = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)
