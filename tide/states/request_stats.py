"""What drift needs of the request table, as arrays: one entry a request, in the order the requests finished.

Owns which requests count as measured, and how columns of the table become arrays. Knows nothing of thresholds or of
how the table is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tide.domain import PROBE_SLICE

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.str_]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class RequestStats:
    """Requests of a window, ordered by finish. A counter that was not taken is NaN, never 0."""

    finished_at: Floats
    request: Words
    """Id of the request: the one that shards have, so that its logged states can be walked."""
    conversation: Words
    """Requests of one conversation are not independent; a request without one is its own."""
    draft: Words
    """Digest of the draft that served it, ``none`` or ``mixed``."""
    regime: Words
    """``slice|sampling``: acceptance is compared within a regime only."""
    script: Words
    prompt_tokens: Floats
    cached_tokens: Floats
    """Prompt tokens that came from the prefix cache."""
    response_tokens: Floats
    verify_steps: Floats
    proposed: Floats
    accepted: Floats
    sketch: npt.NDArray[np.uint16]
    """[n, buckets] histogram of response tokens; zeros where there is none."""
    pooled: npt.NDArray[np.float32]
    """[n, width] mean hidden state, projected; NaN where there is none."""

    def __len__(self) -> int:
        return len(self.finished_at)

    def take(self, rows: Bools) -> RequestStats:
        """The requests where ``rows`` is true, in the same order."""
        return RequestStats(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def newest(self, after: float, at_least: int) -> RequestStats:
        """Requests that finished after a time, and so many of the newest measured ones in any case."""
        finished = self.finished_at[self.measured]
        start = min(after, np.nextafter(finished[-at_least], -np.inf)) if len(finished) >= at_least else -np.inf
        return self.take(self.finished_at > start)

    @property
    def measured(self) -> Bools:
        """Requests that proposed something and counted it."""
        counted = np.isfinite(self.proposed) & np.isfinite(self.accepted) & np.isfinite(self.verify_steps)
        return counted & (np.nan_to_num(self.proposed) > 0) & (np.nan_to_num(self.verify_steps) > 0)

    @property
    def has_sketch(self) -> Bools:
        """Requests with a token histogram."""
        return np.array(self.sketch.any(axis=1), dtype=np.bool_)

    @property
    def has_pooled(self) -> Bools:
        """Requests with a pooled state that is finite."""
        return np.array(np.isfinite(self.pooled).all(axis=1), dtype=np.bool_) & (self.pooled.shape[1] > 0)

    @property
    def cached(self) -> Bools:
        """Requests most of whose prompt came from the prefix cache; a template's shared head is not most of it."""
        return 2 * self.cached_tokens > self.prompt_tokens

    @property
    def context(self) -> Floats:
        """[n] tokens of prompt and answer together."""
        return self.prompt_tokens + self.response_tokens

    @property
    def slice(self) -> Words:
        """[n] the slice alone."""
        names, place = np.unique(self.regime, return_inverse=True)
        return np.array([name.partition("|")[0] for name in names.tolist()], dtype=np.str_)[place]

    @property
    def rate(self) -> Floats:
        """Accepted over proposed draft tokens; NaN where unmeasured."""
        return np.divide(self.accepted, self.proposed, out=np.full(len(self), np.nan), where=self.measured)


def stats_from_table(table: Any) -> RequestStats:
    """Arrays from a ``pyarrow.Table`` with the columns of ``requests.REQUEST_SCHEMA``; an empty table is fine.

    Requests that TIDE itself sent are left out: they are no traffic.

    Raises:
        KeyError: a column is missing.
    """
    table = table.filter(np.array([name != PROBE_SLICE for name in table["slice"].to_pylist()], dtype=np.bool_))
    table = table.sort_by([("finished_at", "ascending"), ("request", "ascending")])
    slices, sampling, requests = _words(table["slice"]), _words(table["sampling"]), _words(table["request"])
    conversations = _words(table["conversation"])
    return RequestStats(
        finished_at=_floats(table["finished_at"]),
        request=requests,
        conversation=np.where(conversations == UNKNOWN, requests, conversations),
        draft=_words(table["draft"]),
        regime=np.array([f"{a}|{b}" for a, b in zip(slices, sampling, strict=True)], dtype=np.str_),
        script=_words(table["script"]),
        prompt_tokens=_floats(table["prompt_tokens"]),
        cached_tokens=_floats(table["cached_tokens"]),
        response_tokens=_floats(table["response_tokens"]),
        verify_steps=_floats(table["verify_steps"]),
        proposed=_floats(table["proposed"]),
        accepted=_floats(table["accepted"]),
        sketch=_rows(table["token_sketch"], np.zeros, np.uint16),
        pooled=_rows(table["pooled"], _nans, np.float32),
    )


def _floats(column: Any) -> Floats:
    return np.array(column.to_numpy(), dtype=np.float64)


def _words(column: Any) -> Words:
    return np.array([UNKNOWN if value is None else value for value in column.to_pylist()], dtype=np.str_)


def _nans(shape: tuple[int, int], dtype: Any) -> Any:
    return np.full(shape, np.nan, dtype=dtype)


def _rows(column: Any, empty: Any, dtype: Any) -> Any:
    """[n, width] values of a column of fixed-size lists; as ``empty`` makes them where there is no list."""
    present = np.array(column.is_valid().to_numpy(), dtype=np.bool_)
    found = empty((len(present), column.type.list_size), dtype)
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks if len(chunk)]
    if parts:
        found[present] = np.concatenate(parts).reshape(-1, column.type.list_size)
    return found
