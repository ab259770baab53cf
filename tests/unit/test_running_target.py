"""Identity of the running target, and the layers it really captures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace as Some

import pytest
import torch
from safetensors.torch import save_file

from tide.errors import BadInputError, ConfigError
from tide.models.target_files import target_contract
from tide.sglang_plugin import target
from tide.sglang_plugin.target import captured_layers, running_contract

LAYERS = (1, 14, 26)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4, "vocab_size": 10, "num_hidden_layers": 30}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.zeros(10, 4)}, folder / "model.safetensors")
    return folder


def test_the_contract_is_the_one_that_training_and_evaluation_compute(model: Path, tmp_path: Path) -> None:
    contract = running_contract(model, LAYERS, "torch.float32", None, tmp_path / "cache.json")
    assert contract == target_contract(model, LAYERS, "float32")


def test_an_unchanged_model_is_hashed_once_and_a_changed_one_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, hashed = tmp_path / "cache.json", list[Path]()

    def counted(folder: Path, *args: object) -> object:
        hashed.append(folder)
        return target_contract(folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "target_contract", counted)
    first = running_contract(model, LAYERS, "bfloat16", None, cache)
    assert running_contract(model, LAYERS, "bfloat16", None, cache) == first
    assert len(hashed) == 1
    save_file({"model.embed_tokens.weight": torch.ones(10, 4)}, model / "model.safetensors")
    os.utime(model / "model.safetensors", (5.0, 5.0))
    changed = running_contract(model, LAYERS, "bfloat16", None, cache)
    assert [line.split(":")[0] for line in first.differences(changed)] == ["weights"]
    cache.write_text("not json")
    assert running_contract(model, LAYERS, "bfloat16", None, cache) == changed


def test_quantising_while_loading_is_part_of_the_identity(model: Path, tmp_path: Path) -> None:
    plain = running_contract(model, LAYERS, "bfloat16", None, tmp_path / "cache.json")
    quantised = running_contract(model, LAYERS, "bfloat16", "fp8", tmp_path / "cache.json")
    assert plain.differences(quantised) == ("quantization: None != fp8",)


def test_an_incomplete_model_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(BadInputError, match="tokenizer"):
        running_contract(model, LAYERS, "bfloat16", None, tmp_path / "cache.json")


def test_captured_layers_are_named_by_their_outputs() -> None:
    assert captured_layers(Some(model=Some(layers_to_capture=[2, 15, 27]))) == LAYERS


@pytest.mark.parametrize(("layers", "hint"), [([], "captures no layers"), ([0, 2, 3], "embedding")])
def test_a_model_that_captures_nothing_nameable_is_refused(layers: list[int], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        captured_layers(Some(model=Some(layers_to_capture=layers)))
