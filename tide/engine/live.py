"""The figures of a replica at this moment, as whoever watches reads them. Knows nothing of how they are got."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import Field

from tide.domain import Record


class LiveFigures(Record):
    """Figures of one replica; what is not known is None or left out."""

    accept_length: float | None = None
    """Tokens a verify step, bonus included, over SGLang's last logging interval; None: nothing was decoded in it."""
    running: float | None = None
    """Requests being decoded."""
    capture: dict[str, float] = Field(default_factory=dict)
    """The plugin's counters by name without their prefix, summed over reasons: ``rows_total``, ``dropped_rows_total``,
    ``spool_bytes`` ..."""


Live = Mapping[str, Callable[[], LiveFigures]]
"""How the figures of each replica are read, by its name."""
