"""Evidently's report on a window's requests against the reference, for a person to read. The only user of Evidently.

Owns what a report can be made of and that it appears whole or not at all. Decides nothing, ever: a report that cannot
be made is a warning, and the drift gate goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tide.states.request_stats import RequestStats

log = logging.getLogger(__name__)

MIN_ROWS = 2
"""One row reads as 100% drift."""


def frame_of(stats: RequestStats) -> pd.DataFrame:
    """One row a request, one column a signal; what a request lacks (counters, sketch, pooled state) is a column too."""
    regimes = [str(regime).partition("|") for regime in stats.regime]
    return pd.DataFrame(
        {
            "acceptance_rate": stats.rate,
            "measured": stats.measured.astype(np.int64),
            "has_sketch": stats.has_sketch.astype(np.int64),
            "has_pooled": stats.has_pooled.astype(np.int64),
            "verify_steps": stats.verify_steps,
            "prompt_tokens": stats.prompt_tokens,
            "response_tokens": stats.response_tokens,
            "context": stats.context,
            "slice": [slice for slice, _, _ in regimes],
            "sampling": [sampling for _, _, sampling in regimes],
            "script": [str(script) for script in stats.script],
        }
    )


def render(current: pd.DataFrame, reference: pd.DataFrame, path: Path) -> Path | None:
    """Write Evidently's drift report as one HTML file, and its figures as JSON beside it (suffix ``.json``).

    Columns that Evidently cannot compare (missing on a side, no value on a side, nothing but infinities) are left out
    with a warning.

    Args:
        current, reference: one row a request.
        path: file to write; its folder is made when missing.

    Returns:
        The HTML's path, or None when no report could be made; the reason is logged.
    """
    usable = _usable(current, reference)
    if not usable:
        log.warning("no drift report: %d and %d rows leave nothing to compare", len(current), len(reference))
        return None
    frames = [_clean(frame, usable) for frame in (current, reference)]
    temporary = [file.with_name(f".{file.name}.{os.getpid()}.tmp") for file in (path.with_suffix(".json"), path)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _run(frames[0], frames[1])
        found.save_json(str(temporary[0]))
        found.save_html(str(temporary[1]))
        for file, final in zip(temporary, (path.with_suffix(".json"), path), strict=True):
            file.replace(final)
    except Exception as error:  # noqa: BLE001  a picture for people: whatever the vendor raises, the gate goes on
        log.warning("no drift report at %s: %r", path, error)
        return None
    finally:
        for file in temporary:
            with contextlib.suppress(OSError):
                file.unlink()
    return path


def _run(current: pd.DataFrame, reference: pd.DataFrame) -> Any:
    from evidently import Report  # slow: 4 to 12 s
    from evidently.presets import DataDriftPreset

    return Report([DataDriftPreset()]).run(current, reference)


def _usable(current: pd.DataFrame, reference: pd.DataFrame) -> list[str]:
    """Columns with a value on at least two rows of both sides."""
    columns = [str(name) for name in reference.columns if name in current.columns]
    counts = {name: min(_finite(frame[name]).notna().sum() for frame in (current, reference)) for name in columns}
    dropped = [str(name) for name in reference.columns if counts.get(str(name), 0) < MIN_ROWS]
    if dropped:
        log.warning("drift report without %s: too few values to compare", ", ".join(dropped))
    return [name for name in columns if counts[name] >= MIN_ROWS]


def _clean(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame({name: _finite(frame[name]).reset_index(drop=True) for name in columns})


def _finite(column: pd.Series[Any]) -> pd.Series[Any]:
    """Infinities are no values; what is neither number nor truth is text."""
    if pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column):
        return column.astype(object).map(str, na_action="ignore")
    return column.astype("float64").replace([np.inf, -np.inf], np.nan)
