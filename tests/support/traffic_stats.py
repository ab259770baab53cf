"""Made-up request statistics with known acceptance and inputs, for tests of the drift rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.drafts import draft_config, draft_tensors
from tests.support.reports import TARGET
from tide.domain import DraftModel
from tide.models.draft_files import read_contract
from tide.states.request_stats import RequestStats

DRAFT = "d" * 64
BUCKETS, ANSWER, STATE_WIDTH = 512, 90, 64


def make_stats(
    count: int,
    *,
    seed: int = 0,
    rate: float = 0.4,
    sd: float = 0.08,
    draft: str = DRAFT,
    start: float = 0.0,
    unmeasured: int = 0,
    slices: Sequence[str] = ("chat",),
    script: str = "latin",
    prompt_tokens: float = 80.0,
    token_shift: int = 0,
    sampling: str = "greedy",
    turns: int = 1,
    spread: float = 0.0,
    cached: int = 0,
    state_shift: float = 0.0,
) -> RequestStats:
    """Requests one second apart; ``rate`` and ``sd`` are of a request's acceptance rate.

    ``token_shift`` moves the token histogram by so many buckets; every request has a topic of its own.
    ``turns`` is the requests of a conversation, ``spread`` the standard deviation of the rate between conversations,
    ``cached`` how many of the first requests had their prompt in the prefix cache, ``state_shift`` how far the pooled
    states move along one direction, in their own standard deviations.
    """
    rng = np.random.default_rng(seed)
    steps = rng.integers(20, 60, count).astype(np.float64)
    proposed = 3 * steps
    member = np.arange(count) // turns
    rates = rng.normal(rate, sd, count)
    if spread:
        rates = rates + np.random.default_rng([seed, 1]).normal(0, spread, int(member.max(initial=0)) + 1)[member]
    accepted = np.round(proposed * np.clip(rates, 0, 1))
    hidden = np.arange(count) < unmeasured
    for column in (steps, proposed, accepted):
        column[hidden] = np.nan
    chosen = np.array(slices)[np.arange(count) % len(slices)]
    return RequestStats(
        finished_at=start + 1.0 + np.arange(count, dtype=np.float64),
        request=np.array([f"{start:.0f}-{seed}-{i}" for i in range(count)], dtype=np.str_),
        conversation=np.array([f"{start:.0f}-{seed}-c{c}" for c in member], dtype=np.str_),
        draft=np.full(count, draft),
        regime=np.array([f"{name}|{sampling}" for name in chosen], dtype=np.str_),
        script=np.full(count, script),
        prompt_tokens=(prompts := np.round(rng.lognormal(np.log(prompt_tokens), 0.5, count)) + 1),
        cached_tokens=np.where(np.arange(count) < cached, prompts - 1, 0.0),
        response_tokens=np.round(rng.lognormal(np.log(90), 0.4, count)) + 1,
        verify_steps=steps,
        proposed=proposed,
        accepted=accepted,
        sketch=_sketches(count, token_shift, rng),
        pooled=_pooled(count, state_shift, np.random.default_rng([seed, 2])),
    )


def draft_model(**changes: object) -> DraftModel:
    """A draft of ours that serves; its digest is that of the made-up requests."""
    contract = read_contract(draft_config(), draft_tensors(draft_config())["d2t"])
    fields: dict[str, object] = {
        "digest": DRAFT,
        "contract": contract,
        "target": TARGET,
        "states_commit": "commit",
        "trained_tokens": 100_000,
    }
    return DraftModel.model_validate(fields | changes)


def join(*parts: RequestStats) -> RequestStats:
    """One window of several, in this order; give them increasing starts."""
    names = RequestStats.__dataclass_fields__
    return RequestStats(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _pooled(count: int, shift: float, rng: np.random.Generator) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    states = rng.normal(0, 1, (count, STATE_WIDTH))
    states[:, 0] += shift
    return states.astype(np.float32)


def _sketches(count: int, shift: int, rng: np.random.Generator) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    zipf = 1 / (1 + np.arange(BUCKETS, dtype=np.float64))
    common = rng.choice(BUCKETS, size=(count, ANSWER), p=zipf / zipf.sum())
    topics = rng.integers(0, BUCKETS, (count, 20))
    own = np.take_along_axis(topics, rng.integers(0, 20, (count, ANSWER)), axis=1)
    tokens = (np.where(rng.random((count, ANSWER)) < 0.8, common, own) + shift) % BUCKETS
    flat = np.bincount((tokens + np.arange(count)[:, None] * BUCKETS).ravel(), minlength=count * BUCKETS)
    return flat.reshape(count, BUCKETS).astype(np.uint16)
