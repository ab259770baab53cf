"""The data of the decision benchmarks: what real drafts accepted on real requests, one row a request and draft.

Owns the two files and their columns. ``collect.py`` makes them with SGLang and the evaluator; the benchmarks resample
them. TIDE_BENCH_DATA names another folder that holds them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

DATA = Path(os.environ.get("TIDE_BENCH_DATA", Path(__file__).parent / "data"))

SCORES_SCHEMA = pa.schema(
    [
        ("workload", pa.string()),  # chat, functions, code
        ("draft", pa.string()),  # a name; drafts.json beside the file says what each is
        ("source", pa.string()),  # walk: the evaluator's; live: SGLang's own counters
        ("request", pa.string()),
        ("conversation", pa.string()),
        ("slice", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("verify_steps", pa.int32()),
        ("proposed", pa.int32()),
        ("accepted", pa.int32()),
    ]
)
REQUESTS_SCHEMA = pa.schema(
    [
        ("workload", pa.string()),
        ("request", pa.string()),
        ("conversation", pa.string()),
        ("slice", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("script", pa.string()),
        ("token_sketch", pa.list_(pa.uint16(), 512)),
        ("pooled", pa.list_(pa.float32(), 64)),
    ]
)


@dataclass(frozen=True)
class Scores:
    """One draft on the requests of one or more workloads, as arrays in one order."""

    workload: npt.NDArray[np.str_]
    request: npt.NDArray[np.str_]
    conversation: npt.NDArray[np.str_]
    slice: npt.NDArray[np.str_]
    prompt_tokens: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    verify_steps: npt.NDArray[np.int64]
    proposed: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.request)

    def take(self, rows: Any) -> Scores:
        """Some of the requests, by mask or by index."""
        return Scores(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def load_scores(source: str = "walk") -> dict[str, Scores]:
    """Scores by draft, each sorted by request, so that equal places of two drafts walked alike are one request.

    Raises:
        FileNotFoundError: the corpus was not collected; run ``python -m tests.bench.decisions.collect``.
    """
    table = pq.read_table(DATA / "scores.parquet", schema=SCORES_SCHEMA)
    table = table.filter(pc.equal(table["source"], source)).sort_by("request")
    return {
        name: Scores(**{f.name: _column(table, name, f.name) for f in fields(Scores)})
        for name in sorted(set(table["draft"].to_pylist()))
    }


def load_requests() -> pa.Table:
    """What the request table says of each request's inputs."""
    return pq.read_table(DATA / "requests.parquet", schema=REQUESTS_SCHEMA)


def _column(table: pa.Table, draft: str, column: str) -> Any:
    values = table.filter(pc.equal(table["draft"], draft))[column]
    if pa.types.is_integer(values.type):
        return values.to_numpy().astype(np.int64)
    return np.array(values.to_pylist(), dtype=np.str_)
