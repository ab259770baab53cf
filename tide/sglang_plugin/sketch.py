"""Sketches of a request that are small and carry no text: hashed token counts, script, pooled state.

Pure functions of ids, text and rows. They are made inside the engine, so that drift never needs the content.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

BUCKETS = 512
WIDTH = 64
_SEED = 20_240_601
_SCRIPTS = {"CJK": "han", "HIRAGANA": "kana", "KATAKANA": "kana"}


def token_sketch(ids: Sequence[int]) -> list[int]:
    """[512] counts of hashed ids, each at most 65535."""
    # Fibonacci hashing: neighbouring ids (often related pieces) must not share a bucket by plain modulo.
    hashed = (np.asarray(ids, dtype=np.uint64) * np.uint64(11400714819323198485)) >> np.uint64(55)
    counts = np.bincount(hashed.astype(np.int64), minlength=BUCKETS)
    return [int(c) for c in np.minimum(counts, 65535)]


def script_of(text: str) -> str:
    """Script of most letters of a text: ``latin``, ``han``, ``cyrillic`` ...; ``none`` without letters."""
    names = Counter(unicodedata.name(c, "UNKNOWN").split()[0].split("-")[0] for c in text if c.isalpha())
    if not names:
        return "none"
    scripts: Counter[str] = Counter()
    for name, count in names.items():
        scripts[_SCRIPTS.get(name, name.lower())] += count
    return scripts.most_common(1)[0][0]


def pooled_state(last: torch.Tensor) -> list[float]:
    """Mean of rows, projected.

    Args:
        last: [n, H], n >= 1.

    Returns:
        [64] floats.
    """
    mean = last.to(torch.float32).mean(dim=0)
    return [float(v) for v in mean @ _projection(int(mean.shape[0]))]


@lru_cache(maxsize=4)
def _projection(width: int) -> torch.Tensor:
    """The same [width, 64] matrix in every process, for ever: pooled states of different replicas are compared."""
    values = np.random.Generator(np.random.PCG64(_SEED)).standard_normal((width, WIDTH)) / np.sqrt(width)
    return torch.from_numpy(values.astype(np.float32))
