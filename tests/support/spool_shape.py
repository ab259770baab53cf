"""What the small spools of tests are made for: the tiny target and the window; without torch, which costs seconds."""

from __future__ import annotations

from tide.domain import TargetContract

HIDDEN, VOCAB = 32, 32
WINDOW_S = 300
START = 1_796_000_100.0
"""A multiple of WINDOW_S: the beginning of a window."""
TARGET = TargetContract(
    weights="a" * 64, tokenizer="b" * 64, dtype="bfloat16", hidden_size=HIDDEN, vocab_size=VOCAB, aux_layers=(1, 2, 3)
)
