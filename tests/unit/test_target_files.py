"""The identity of a target model, and the head-only bundle cut from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tide.errors import BadInputError
from tide.models.target_files import (
    INDEX_FILE,
    bundle_contract,
    eagle3_layers,
    final_norm_key,
    head_keys,
    load_tensor,
    target_contract,
    tensor_files,
)
from tide.trainer.bundle import write_bundle

LAYERS = (1, 3, 4)


def write_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A model folder of two weight files."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    files = {
        "model-1.safetensors": {"model.embed_tokens.weight": torch.randn((20, 8), generator=generator)},
        "model-2.safetensors": {
            "model.norm.weight": torch.randn(8, generator=generator),
            "model.layers.0.mlp.up_proj.weight": torch.randn((16, 8), generator=generator),
        },
    }
    if not tied:
        files["model-2.safetensors"]["lm_head.weight"] = torch.randn((20, 8), generator=generator)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    config = {"hidden_size": 8, "vocab_size": 20, "num_hidden_layers": 8, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_the_same_files_are_the_same_target_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert target_contract(copy, LAYERS, "bfloat16") == target_contract(model, LAYERS, "torch.bfloat16")


@pytest.mark.parametrize("part", ["weights", "tokenizer", "dtype", "aux_layers", "quantization"])
def test_each_part_of_a_changed_target_is_named(model: Path, part: str) -> None:
    before = target_contract(model, LAYERS, "bfloat16")
    layers, dtype = LAYERS, "bfloat16"
    if part == "weights":
        save_file({"model.norm.weight": torch.zeros(8)}, model / "model-2.safetensors")
    elif part == "tokenizer":
        (model / "tokenizer.json").write_text('{"added": 1}')
    elif part == "dtype":
        dtype = "float32"
    elif part == "aux_layers":
        layers = (1, 2, 4)
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    (difference,) = before.differences(target_contract(model, layers, dtype))
    assert difference.startswith(f"{part}: ")


def test_a_weight_file_beside_the_index_does_not_count(model: Path) -> None:
    before = target_contract(model, LAYERS, "bfloat16")
    save_file({"x": torch.zeros(1)}, model / "consolidated.safetensors")
    assert target_contract(model, LAYERS, "bfloat16") == before


def test_a_missing_weight_file_is_named(model: Path) -> None:
    (model / "model-2.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"model-2\.safetensors"):
        target_contract(model, LAYERS, "bfloat16")


def test_a_model_without_an_index_is_read_from_its_files(model: Path) -> None:
    (model / INDEX_FILE).unlink()
    assert final_norm_key(model) == "model.norm.weight"
    assert head_keys(model) == ("model.embed_tokens.weight", "model.embed_tokens.weight")


def test_a_missing_head_is_an_error_unless_it_is_tied(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "untied", tied=False)
    assert head_keys(folder) == ("model.embed_tokens.weight", "lm_head.weight")
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"]["lm_head.weight"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(BadInputError, match="lm_head"):
        head_keys(folder)


def test_the_usual_layers_are_early_middle_and_late(model: Path) -> None:
    assert eagle3_layers(model) == LAYERS
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(BadInputError, match="too few"):
        eagle3_layers(model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_bundle_holds_head_and_norm_and_the_contract_of_the_whole_model(tmp_path: Path, tied: bool) -> None:
    model = write_model(tmp_path / "model", tied=tied)
    contract = target_contract(model, LAYERS, "bfloat16")
    bundle = write_bundle(model, tmp_path / "bundle", contract)
    assert bundle_contract(bundle) == contract
    heads = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    assert set(tensor_files(bundle)) == heads
    assert head_keys(bundle) == head_keys(model)
    for key in heads:
        assert torch.equal(load_tensor(bundle, key), load_tensor(model, key))
    assert sum(len(load_file(path)) for path in bundle.glob("*.safetensors")) == len(heads)


def test_a_bundle_is_used_again_for_its_target_and_replaced_for_another(tmp_path: Path, model: Path) -> None:
    contract = target_contract(model, LAYERS, "bfloat16")
    bundle = write_bundle(model, tmp_path / "bundle", contract)
    stamp = (bundle / "config.json").stat().st_ino
    assert (write_bundle(model, bundle, contract) / "config.json").stat().st_ino == stamp
    other = write_model(tmp_path / "other", seed=1)
    changed = target_contract(other, LAYERS, "bfloat16")
    assert bundle_contract(write_bundle(other, bundle, changed)) == changed
    assert torch.equal(load_tensor(bundle, "model.norm.weight"), load_tensor(other, "model.norm.weight"))


def test_a_bundle_that_cannot_be_finished_leaves_nothing(tmp_path: Path, model: Path) -> None:
    contract = target_contract(model, LAYERS, "bfloat16")
    (model / "model-2.safetensors").write_bytes(b"broken")
    with pytest.raises(BadInputError, match="unreadable"):
        write_bundle(model, tmp_path / "bundle", contract)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
