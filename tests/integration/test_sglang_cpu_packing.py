"""Packed linear layers on the CPU compute what the plain ones do, and never from weights that were replaced."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # before SGLang is first imported: it decides its platform then

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing SGLang on a CPU warns about each kernel that is not there
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
    from tide_sglang_cpu import packing


class Layer(nn.Module):
    """What SGLang's linear layers and heads have in common."""

    def __init__(self, method: object, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = nn.Parameter(torch.randn(rows, width, dtype=dtype), requires_grad=False)


class Model(nn.Module):
    """Two linear layers of different dtype, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Layer(UnquantizedLinearMethod(), 96, 32)
        self.brief = Layer(UnquantizedLinearMethod(), 96, 32, torch.bfloat16)
        self.embed = Layer(UnquantizedEmbeddingMethod(), 50, 32)
        self.lm_head = Layer(UnquantizedEmbeddingMethod(), 50, 32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            # As SGLang's loaders write: past autograd's version counter.
            self.get_parameter(name).data.copy_(tensor)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    assert packing.pack(made) == 2
    return made


@pytest.mark.parametrize("rows", [1, 3, 4, 16, 64, 257])
def test_a_packed_product_equals_the_plain_one_at_any_number_of_rows(model: Model, rows: int) -> None:
    x, bias = torch.randn(rows, 32), torch.randn(96)
    torch.testing.assert_close(
        model.up.quant_method.apply(model.up, x, bias), linear(x, model.up.weight, bias), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        model.lm_head.quant_method.apply(model.lm_head, x), linear(x, model.lm_head.weight), rtol=1e-5, atol=1e-5
    )


def test_an_empty_batch_gives_no_rows(model: Model) -> None:
    assert model.up.quant_method.apply(model.up, torch.empty(0, 32)).shape == (0, 96)


def test_loading_weights_drops_the_packed_copy_even_when_it_fails_half_way(model: Model) -> None:
    x = torch.randn(4, 32)
    model.up.quant_method.apply(model.up, x)
    fresh = torch.randn(96, 32)
    with pytest.raises(AttributeError, match="gone"):
        model.load_weights([("up.weight", fresh), ("gone.weight", fresh)])
    torch.testing.assert_close(model.up.quant_method.apply(model.up, x), linear(x, fresh), rtol=1e-5, atol=1e-5)


def test_embeddings_and_layers_of_another_dtype_stay_as_they_are(model: Model) -> None:
    assert type(model.embed.quant_method) is UnquantizedEmbeddingMethod
    assert type(model.brief.quant_method) is UnquantizedLinearMethod
    assert packing.pack(model) == 0, "packing twice would pack the packed"


def test_a_tied_head_still_embeds() -> None:
    model = Model()
    model.embed = model.lm_head
    packing.pack(model)
    ids = torch.tensor([3, 7])
    assert torch.equal(model.lm_head.quant_method.embedding(model.lm_head, ids), model.lm_head.weight[ids])
