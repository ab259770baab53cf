"""The request table: one row for every request served, as parquet segments that the plugin writes and harvest merges.

Owns the columns, their order and types, and how a segment becomes complete (parquet first, manifest last). Knows
nothing of the engine that counts, of lakeFS, or of what drift makes of the figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from tide.domain import RequestSegment, TargetContract
from tide.errors import BadInputError
from tide.files import write_durably

SKETCH_BUCKETS = 512
POOLED_WIDTH = 64

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("request", pa.string(), nullable=False),
        pa.field("conversation", pa.string()),
        pa.field("slice", pa.string()),
        pa.field("split", pa.string()),
        pa.field("started_at", pa.float64(), nullable=False),
        pa.field("finished_at", pa.float64(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("response_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("verify_steps", pa.int32()),
        pa.field("proposed", pa.int32()),
        pa.field("accepted", pa.int32()),
        pa.field("temperature", pa.float32()),
        pa.field("sampling", pa.string(), nullable=False),
        pa.field("draft", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("captured_rows", pa.int32(), nullable=False),
        pa.field("opted_out", pa.bool_(), nullable=False),
        pa.field("token_sketch", pa.list_(pa.uint16(), SKETCH_BUCKETS)),
        pa.field("script", pa.string()),
        pa.field("pooled", pa.list_(pa.float32(), POOLED_WIDTH)),
    ]
)
"""Columns of the request table. A null counter means unmeasured, never 0.

``sampling`` is ``greedy``, ``sampled`` or ``unknown``; ``draft`` a digest, ``none`` or ``mixed``; times are seconds
since the epoch; ``token_sketch`` is a histogram of response tokens over 512 buckets, ``pooled`` a projected state.
"""

SAMPLING = ("greedy", "sampled", "unknown")


def request_row(request: str, started_at: float, finished_at: float, **columns: Any) -> dict[str, Any]:
    """A complete row: what is not given is null, or the neutral value of a column that takes no null.

    Raises:
        BadInputError: a name that is no column.
    """
    row: dict[str, Any] = dict.fromkeys(REQUEST_SCHEMA.names)
    row |= {
        "prompt_tokens": 0,
        "response_tokens": 0,
        "cached_tokens": 0,
        "captured_rows": 0,
        "opted_out": False,
    }
    row |= {"sampling": "unknown", "draft": "none", "finish_reason": "unknown"}
    _refuse_unknown(columns)
    return row | columns | {"request": request, "started_at": started_at, "finished_at": finished_at}


def write_segment(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    target: TargetContract,
    opened_at: float,
    closed_at: float,
    dropped: Mapping[str, int],
    excluded: Mapping[str, int],
) -> RequestSegment:
    """Write ``<sha256>.parquet`` and then its manifest ``<sha256>.json`` into a folder.

    Args:
        folder: created when missing; temporary names in it start with a dot.
        rows: one mapping a request, with the columns of REQUEST_SCHEMA; missing ones are null. May be empty: the
            counters of a period without requests still count.
        dropped: rows lost by a fault or for want of room in this period, by reason.
        excluded: requests not captured because policy said so in this period, by reason.

    Raises:
        BadInputError: a row has an unknown column, a wrong type or a null where none is allowed.
        OSError: the disk refused; nothing readable is left behind.
    """
    counters = {"dropped": dict(dropped), "excluded": dict(excluded)}
    # The period and its counters go into the file as well: two periods without a request must not share a name.
    period = {"opened_at": opened_at, "closed_at": closed_at, **counters}
    data = _to_bytes(_to_table(rows).replace_schema_metadata({"tide.period": json.dumps(period, sort_keys=True)}))
    segment = RequestSegment(
        name=hashlib.sha256(data).hexdigest(),
        target=target,
        rows=len(rows),
        opened_at=opened_at,
        closed_at=closed_at,
        dropped=dict(dropped),
        excluded=dict(excluded),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / segment.file, data)
    write_durably(folder / f"{segment.name}.json", segment.to_json().encode())
    return segment


def read_segment(manifest: Path) -> RequestSegment:
    """The manifest of a segment, checked against its file.

    Raises:
        BadInputError: the manifest is malformed, or the file is missing, short or changed.
    """
    try:
        segment = RequestSegment.model_validate_json(manifest.read_bytes())
        data = (manifest.parent / segment.file).read_bytes()
    except (OSError, ValidationError) as error:
        raise BadInputError(f"request segment {manifest}: unreadable: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != segment.name:
        raise BadInputError(f"request segment {manifest}: sha256 is {found[:12]}, its name says {segment.name[:12]}")
    rows = parse_table(data, segment.file).num_rows
    if rows != segment.rows:
        raise BadInputError(f"request segment {manifest}: {rows} rows, the manifest says {segment.rows}")
    return segment


def read_table(paths: Iterable[Path]) -> pa.Table:
    """The rows of any number of segments or merged tables, in the order given; no paths give an empty table.

    Raises:
        BadInputError: a file is no parquet, or its columns are not REQUEST_SCHEMA.
    """
    return pa.concat_tables([REQUEST_SCHEMA.empty_table(), *(_read_one(path) for path in paths)])


def parse_table(data: bytes, name: str) -> pa.Table:
    """The rows of one parquet file in memory.

    Raises:
        BadInputError: as read_table; names ``name``.
    """
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (OSError, pa.ArrowInvalid) as error:
        raise BadInputError(f"request table {name}: unreadable: {error}") from error
    if not table.schema.equals(REQUEST_SCHEMA):
        raise BadInputError(f"request table {name}: columns are not those of this version: {table.schema.names}")
    return table.replace_schema_metadata(None)


def merge_segments(paths: Iterable[Path]) -> bytes:
    """One parquet file with the rows of all segments, the same bytes whatever the order of the paths.

    Rows are ordered by finish, start and request. A row that stands in two segments is kept once.

    Raises:
        BadInputError: as read_table.
    """
    table = read_table(sorted(paths))
    order = [
        ("finished_at", "ascending"),
        ("started_at", "ascending"),
        ("request", "ascending"),
    ]
    table = table.take(pc.sort_indices(table, sort_keys=order))
    return _to_bytes(_distinct(table))


def without_rows(data: bytes, name: str, drop: Callable[[str, str | None], bool]) -> tuple[bytes, int]:
    """A merged table without some rows, and how many rows it has left.

    Args:
        drop: says of a row's request and conversation whether it goes.

    Raises:
        BadInputError: as parse_table.
    """
    table = parse_table(data, name)
    rows = zip(table["request"].to_pylist(), table["conversation"].to_pylist(), strict=True)
    keep = pa.array([not drop(request, conversation) for request, conversation in rows], type=pa.bool_())
    left = table.filter(keep)
    return _to_bytes(left), left.num_rows


def _refuse_unknown(columns: Iterable[str]) -> None:
    unknown = sorted(set(columns) - set(REQUEST_SCHEMA.names))
    if unknown:
        raise BadInputError(f"request row: no such column: {', '.join(unknown)}")


def _to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    for row in rows:
        _refuse_unknown(row)
        if row.get("sampling") not in SAMPLING:
            raise BadInputError(f"request {row.get('request')}: sampling {row.get('sampling')!r} is not in {SAMPLING}")
    arrays = []
    for field in REQUEST_SCHEMA:
        try:
            array = pa.array([row.get(field.name) for row in rows], type=field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise BadInputError(f"request table: column {field.name}: {error}") from error
        if array.null_count and not field.nullable:
            first = array.is_null().index(True).as_py()
            raise BadInputError(f"request table: column {field.name} is null in row {first}, and takes no null")
        arrays.append(array)
    return pa.table(arrays, schema=REQUEST_SCHEMA)


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def _read_one(path: Path) -> pa.Table:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"request table {path}: unreadable: {error}") from error
    return parse_table(data, str(path))


def _distinct(table: pa.Table) -> pa.Table:
    seen: set[tuple[str, float]] = set()
    keep = []
    keys = zip(table["request"].to_pylist(), table["finished_at"].to_pylist(), strict=True)
    for key in keys:
        keep.append(key not in seen)
        seen.add(key)
    return table.filter(pa.array(keep, type=pa.bool_()))
