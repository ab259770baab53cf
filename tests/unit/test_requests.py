"""The request table: columns, complete or absent, merged the same way in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.spooled import TARGET
from tide.errors import BadInputError
from tide.states import requests


def _write(folder: Path, *rows: dict[str, Any], opened_at: float = 1.0, **counts: dict[str, int]) -> Path:
    counters = {"dropped": {}, "excluded": {}} | counts
    segment = requests.write_segment(folder, rows, target=TARGET, opened_at=opened_at, closed_at=9.0, **counters)
    return folder / segment.file


def _row(name: str, at: float = 5.0, **columns: Any) -> dict[str, Any]:
    return requests.request_row(name, at - 1, at, **columns)


def test_a_row_is_read_back_with_nulls_where_nothing_was_measured(tmp_path: Path) -> None:
    sketch, pooled = list(range(512)), [0.5] * 64
    path = _write(
        tmp_path,
        _row("a", verify_steps=3, accepted=5, proposed=9, token_sketch=sketch, pooled=pooled, sampling="greedy"),
        _row("b", opted_out=True),
    )
    table = requests.read_table([path])
    assert table.schema.equals(requests.REQUEST_SCHEMA)
    measured, unmeasured = table.to_pylist()
    assert (measured["verify_steps"], measured["token_sketch"], measured["pooled"]) == (3, sketch, pooled)
    assert unmeasured["verify_steps"] is None
    assert unmeasured["token_sketch"] is None
    assert unmeasured["opted_out"] is True


def test_the_manifest_describes_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, _row("a"), dropped={"queue_full": 7}, excluded={"too_short": 1})
    segment = requests.read_segment(path.with_suffix(".json"))
    assert (segment.rows, segment.dropped, segment.excluded) == (1, {"queue_full": 7}, {"too_short": 1})
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".parquet"]


def test_two_periods_without_requests_do_not_share_a_name(tmp_path: Path) -> None:
    one = _write(tmp_path, opened_at=1.0, dropped={"queue_full": 1})
    two = _write(tmp_path, opened_at=2.0, dropped={"queue_full": 1})
    assert one != two
    assert requests.read_table([one, two]).num_rows == 0


def test_a_merge_has_the_same_bytes_in_any_order_and_rows_in_time_order(tmp_path: Path) -> None:
    paths = [_write(tmp_path, _row("a", 7.0), _row("c", 3.0)), _write(tmp_path, _row("b", 5.0))]
    merged = requests.merge_segments(paths)
    assert merged == requests.merge_segments(paths[::-1])
    assert requests.parse_table(merged, "merged")["request"].to_pylist() == ["c", "b", "a"]


def test_a_row_that_stands_in_two_pieces_is_kept_once(tmp_path: Path) -> None:
    first, again = _write(tmp_path, _row("a"), _row("b")), _write(tmp_path, _row("a"), opened_at=2.0)
    merged = tmp_path / "merged"
    merged.write_bytes(requests.merge_segments([first, again]))
    assert requests.read_table([merged])["request"].to_pylist() == ["a", "b"]
    assert requests.merge_segments([merged, first]) == merged.read_bytes()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"acceptance": 1.0}, "acceptance"),
        ({"verify_steps": "three"}, "verify_steps"),
        ({"verify_steps": 2**40}, "verify_steps"),
        ({"draft": None}, "draft"),
        ({"sampling": "hot"}, "sampling"),
        ({"token_sketch": [1, 2]}, "token_sketch"),
    ],
)
def test_a_bad_row_is_refused_with_its_column_and_nothing_is_written(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        _write(tmp_path, _row("a") | columns)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, _row("a"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(BadInputError, match="sha256"):
        requests.read_segment(path.with_suffix(".json"))
    path.unlink()
    with pytest.raises(BadInputError, match="unreadable"):
        requests.read_segment(path.with_suffix(".json"))


def test_a_file_of_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pa.parquet.write_table(pa.table({"request": ["a"]}), path)
    with pytest.raises(BadInputError, match=r"other\.parquet"):
        requests.read_table([path])
    path.write_bytes(b"not parquet")
    with pytest.raises(BadInputError, match=r"other\.parquet"):
        requests.read_table([path])
