"""Slices as strata: inputs are compared slice by slice, so that a change of the mix between known slices is no shift.

Owns which slices of a reference are known, and which requests of a window are compared with which of the reference.
Knows nothing of the signals that are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tide.states.request_stats import Bools, Words

MIN_REQUESTS = 10
"""A slice with fewer requests in the reference is not known: what it holds is compared with the whole reference."""
REST = "*"
"""Stands for the whole reference; no slice has this name, as admission knows letters, digits, - and _ only."""


def known(slices: Words) -> list[str]:
    """Slices that a reference has enough requests of."""
    names, counts = np.unique(slices, return_counts=True)
    return [str(name) for name, count in zip(names, counts, strict=True) if count >= MIN_REQUESTS]


def strata(window: Words, names: list[str]) -> Iterator[tuple[str, Bools]]:
    """(slice, mask of the window's requests) of each known slice that the window has, ``REST`` for all the others."""
    rest = np.ones(len(window), dtype=np.bool_)
    for name in names:
        mask = window == name
        rest &= ~mask
        if mask.any():
            yield name, mask
    if rest.any():
        yield REST, rest
