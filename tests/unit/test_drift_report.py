from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.traffic_stats import make_stats
from tide.drift import report as drift_report
from tide.drift.report import frame_of, render


def frame(rows: int = 60, **columns: Any) -> pd.DataFrame:
    rng = np.random.default_rng(rows)
    values = {
        "rate": rng.random(rows),
        "prompt_tokens": rng.integers(5, 50, rows),
        "script": ["latin", "greek"] * (rows // 2),
    }
    return pd.DataFrame(values | columns)


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "drift.html"
    assert render(frame(60), frame(80), path) == path
    assert "<html" in path.read_text()[:2000].lower()
    assert sorted(p.name for p in path.parent.iterdir()) == ["drift.html", "drift.json"]
    assert json.loads(path.with_suffix(".json").read_text())["metrics"]


@pytest.mark.parametrize(
    "broken",
    [
        {"rate": [np.nan] * 60},
        {"rate": [np.inf] * 60},
        {"rate": [None] * 60},
        {"rate": [None, None, *[0.5] * 58]},
        {"rate": [np.inf, -np.inf, *[0.5] * 58]},
        {"script": [None] * 60},
        {"script": [None, None, *["latin"] * 58]},
        {"measured": [True] * 60},
    ],
    ids=["all nan", "all inf", "all none", "two none", "two inf", "no text", "two texts missing", "extra column"],
)
def test_columns_that_cannot_be_compared_do_not_cost_the_report(tmp_path: Path, broken: dict[str, Any]) -> None:
    assert render(frame(60, **broken), frame(80), tmp_path / "drift.html") is not None


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_give_no_report(tmp_path: Path, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert render(frame(60).head(rows), frame(80), tmp_path / "drift.html") is None
        assert render(frame(60), frame(80).head(rows), tmp_path / "drift.html") is None
    assert "nothing to compare" in caplog.text
    assert not list(tmp_path.iterdir())


def test_no_common_column_gives_no_report(tmp_path: Path) -> None:
    assert render(frame(60), pd.DataFrame({"other": range(10)}), tmp_path / "drift.html") is None


def test_a_failing_vendor_gives_a_warning_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("inside the vendor")

    monkeypatch.setattr(drift_report, "_run", fail)
    with caplog.at_level(logging.WARNING):
        assert render(frame(60), frame(80), tmp_path / "drift.html") is None
    assert "inside the vendor" in caplog.text
    assert not list(tmp_path.iterdir())


def test_an_unwritable_place_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert render(frame(60), frame(80), tmp_path / "file" / "drift.html") is None


def test_requests_become_rows_with_unmeasured_as_a_feature() -> None:
    stats = make_stats(10, unmeasured=3)
    rows = frame_of(stats)
    assert len(rows) == 10
    assert rows["measured"].sum() == 7
    assert rows["acceptance_rate"].isna().sum() == 3
    assert (rows["has_sketch"].sum(), rows["has_pooled"].sum()) == (10, 10)
    assert set(rows["slice"]) == {"chat"}
