"""The packaged target model, converted for real, and the draft that serves before any was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from infra.models import ORIGIN_FILE, ensure_target_model, untrained_draft
from tests.support.states import target_model
from tide.errors import BadInputError
from tide.models.draft_files import load_draft
from tide.models.target_files import INDEX_FILE, eagle3_layers, head_keys, target_contract


def test_the_target_has_an_index_a_tied_head_and_one_end_of_turn() -> None:
    model = target_model()
    assert (model / INDEX_FILE).exists()
    assert head_keys(model) == ("model.embed_tokens.weight", "model.embed_tokens.weight")
    assert eagle3_layers(model) == (1, 14, 26)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == tokenizer["pad_token"] == "<|im_end|>"
    assert json.loads((model / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_finished_conversion_is_used_again_and_says_so(tmp_path: Path) -> None:
    home = tmp_path
    (home / "models").mkdir()
    shutil.copytree(target_model(), home / "models" / target_model().name)
    said: list[str] = []
    model = ensure_target_model(home, said.append)
    assert said == [f"target model: {model} is up to date"]


def test_the_untrained_draft_is_the_same_every_time_and_fits_its_target(tmp_path: Path) -> None:
    model = target_model()
    one, two = untrained_draft(model, tmp_path / "a"), untrained_draft(model, tmp_path / "b")
    assert one.name == two.name
    contract = load_draft(one, expected=one.name).contract
    assert contract.aux_layers == (1, 14, 26)
    assert (contract.vocab_size, contract.draft_vocab_size) == (49152, 8192)
    assert (contract.hidden_size, contract.rope_theta) == (576, 100000.0)


def test_a_model_folder_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(target_model(), copy)
    (copy / "tokenizer.json").unlink()
    assert (copy / ORIGIN_FILE).exists()
    with pytest.raises(BadInputError, match=r"tokenizer\.json"):
        target_contract(copy, (1, 14, 26), "bfloat16")
