"""What a run takes: against what others measured, against what autograd really keeps, and in its proportions."""

from __future__ import annotations

import pytest

from tests.support.shapes import contract
from tide.models.draft_format import expected_shapes
from tide.trainer.memory import (
    SCORE_BYTES,
    _attention_rows,
    disk_bytes,
    parameters,
    sample_bytes_a_row,
    state_bytes_a_row,
    training_memory,
)

GIB = 2**30
# Peak memory of SpecForge's attention benchmark: bfloat16, batch 4, 32 heads of 128, 8 key heads, 7 steps, on a B200
# (SpecForge pull request 97). GiB by rows.
SDPA = {640: 7.542, 1152: 20.759, 1664: 40.495, 2176: 66.743, 2688: 99.513, 3200: 138.795}
FLEX = {640: 2.390, 1152: 4.105, 1664: 6.246, 2176: 8.737}


@pytest.mark.parametrize("rows", SDPA)
def test_the_attention_of_sdpa_takes_what_the_published_benchmark_took(rows: int) -> None:
    estimate = training_memory(contract(), length=rows, batch=4, ttt_length=7, backend="sdpa", width=2)
    attention = estimate.scores + 4 * rows * 7 * _attention_rows(contract(), 2)
    assert attention / GIB == pytest.approx(SDPA[rows], rel=0.02)


@pytest.mark.parametrize("rows", FLEX)
def test_the_attention_of_flex_takes_what_the_published_benchmark_took(rows: int) -> None:
    estimate = training_memory(contract(), length=rows, batch=4, ttt_length=7, backend="flex_attention", width=2)
    assert estimate.scores == 0
    assert 4 * rows * 7 * _attention_rows(contract(), 2) / GIB == pytest.approx(FLEX[rows], rel=0.12)


def test_scores_grow_with_the_square_of_the_length_and_nothing_else_does() -> None:
    short, long = (
        training_memory(contract(), length=n, batch=2, ttt_length=3, backend="sdpa", width=2) for n in (512, 1024)
    )
    assert long.scores == 4 * short.scores == 4 * int(2 * 32 * 512**2 * 3 * SCORE_BYTES)
    assert long.activations == 2 * short.activations
    assert long.weights == short.weights
    assert long.total == sum((long.weights, long.frozen, long.activations, long.vocabulary, long.scores))


def test_every_tensor_of_a_draft_but_its_maps_is_trained() -> None:
    shapes = expected_shapes(contract())
    assert {"d2t", "t2d"} < shapes.keys()
    whole = parameters(contract(draft_vocab_size=128_256))
    assert whole - parameters(contract()) == (128_256 - 32_000) * 4096


def test_a_captured_row_has_the_bytes_of_its_shard() -> None:
    assert state_bytes_a_row(576) == 4 * 576 * 2 + 16
    assert sample_bytes_a_row(576, 2) == state_bytes_a_row(576)


def test_disk_grows_with_tokens_and_with_checkpoints() -> None:
    one = disk_bytes(contract(), tokens=1000, checkpoints=1, width=2)
    assert disk_bytes(contract(), tokens=2000, checkpoints=1, width=2) - one == 1000 * 2 * state_bytes_a_row(4096)
    more = disk_bytes(contract(), tokens=1000, checkpoints=2, width=2) - one
    assert more == parameters(contract()) * 16 + 128_256 * 4096 * 2
