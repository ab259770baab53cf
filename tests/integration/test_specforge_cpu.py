"""What the CPU shim puts into SpecForge equals what it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tide.trainer.specforge_cpu import _loss_class, _teacher

BATCH, ROWS, HIDDEN, VOCAB, DRAFT_VOCAB, LENGTH = 3, 11, 16, 60, 20, 2


@pytest.fixture(scope="module")
def specforge() -> Iterator[Any]:
    """SpecForge's own teacher and loss, uncompiled; importing its model warns of flash attention."""
    with torch._dynamo.config.patch(disable=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from specforge.core import compact_teacher, loss

        yield type("SpecForge", (), {"teacher": compact_teacher, "loss": loss})


def mask(seed: int = 0) -> torch.Tensor:
    """[B, T, 1] int64, about half of it set, whole rows of a batch included."""
    found = (torch.rand((BATCH, ROWS, 1), generator=torch.Generator().manual_seed(seed)) < 0.5).long()
    found[-1] = 0
    return found


def test_the_plain_loss_and_its_gradient_equal_specforges_reference(specforge: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    target = torch.rand((BATCH, ROWS, DRAFT_VOCAB), generator=generator).softmax(-1)
    values = torch.randn((BATCH, ROWS, DRAFT_VOCAB), generator=generator)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss = _loss_class().apply(ours, target, mask())  # type: ignore[attr-defined]
    reference = specforge.loss._compute_loss(theirs, target, mask())
    torch.testing.assert_close(loss, reference)
    loss.backward()
    reference.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_teacher_of_supervised_rows_equals_specforges_own(specforge: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn((BATCH, ROWS, HIDDEN), generator=generator)
    head = torch.randn((VOCAB, HIDDEN), generator=generator)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]] = True
    ours = _teacher(specforge.teacher.compute_target_from_hidden)(hidden, head, t2d, mask(), LENGTH, chunk_size=16)
    theirs = specforge.teacher.compute_target_p_padded_from_hidden(hidden, head, t2d, mask(), LENGTH, chunk_size=16)
    supervised = mask().squeeze(-1).bool()
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one[:, :ROWS][supervised], other[:, :ROWS][supervised])
        torch.testing.assert_close(one[:, ROWS:], other[:, ROWS:])
    assert torch.equal(ours[3], theirs[3])
