"""A draft on disk: what is refused, by name, and how it is published."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.drafts import TOY, draft_config, draft_tensors
from tide.domain import DraftModel, TargetContract
from tide.errors import ContractMismatch, DraftError
from tide.models.draft_files import (
    DraftFiles,
    load_draft,
    read_contract,
    target_ids,
    validate_tensors,
    write_draft,
    write_record,
)

TARGET = TargetContract(
    weights="a" * 64, tokenizer="b" * 64, dtype="bfloat16", hidden_size=16, vocab_size=50, aux_layers=(1, 2, 3)
)


def put(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A draft folder written past every check, as a stranger would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def record_of(draft: DraftFiles, **changes: Any) -> DraftModel:
    return DraftModel(**{"digest": draft.digest, "contract": draft.contract, "target": TARGET, **changes})


def test_a_draft_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    config, tensors = draft_config(), draft_tensors(draft_config())
    folder, digest = write_draft(tmp_path, config, tensors)
    draft = load_draft(folder, expected=digest)
    assert folder.name == digest == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert draft.config == config
    assert draft.tensors.keys() == tensors.keys()
    assert all(torch.equal(draft.tensors[name], tensors[name]) for name in tensors)
    assert draft.target_ids.tolist() == list(range(0, 40, 2))


def test_writing_a_draft_twice_changes_nothing_and_leaves_no_scratch(tmp_path: Path) -> None:
    config, tensors = draft_config(), draft_tensors(draft_config())
    folder, digest = write_draft(tmp_path, config, tensors)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert write_draft(tmp_path, config, tensors) == (folder, digest)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == [digest]


def test_the_same_draft_always_has_the_same_digest(tmp_path: Path) -> None:
    tensors = draft_tensors(draft_config())
    # Ten times: the order of the file's metadata is shuffled by the library.
    digests = {write_draft(tmp_path / str(i), draft_config(), tensors)[1] for i in range(10)}
    assert len(digests) == 1


def test_a_draft_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = draft_tensors(draft_config())
    del tensors["fc.weight"]
    with pytest.raises(DraftError, match=r"missing \['fc.weight'\]"):
        write_draft(tmp_path / "drafts", draft_config(), tensors)
    assert not (tmp_path / "drafts").exists()


def test_the_name_of_a_draft_stands_for_its_configuration_too(tmp_path: Path) -> None:
    tensors = draft_tensors(draft_config())
    first, digest = write_draft(tmp_path, draft_config(), tensors)
    _, other = write_draft(tmp_path, draft_config(rope_theta=5000.0), tensors)
    assert digest != other
    (first / "config.json").write_text(json.dumps(draft_config(rope_theta=5000.0)))
    with pytest.raises(ContractMismatch, match=r"config\.json"):
        load_draft(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"draft_vocab_size": None}, "draft_vocab_size missing"),
        ({"rope_theta": None}, "rope_theta missing"),
        ({"eagle_config": {}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"norm_output": True}, "norm_output"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_a_configuration_that_readers_would_take_differently_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        read_contract(draft_config(**changes), draft_tensors(draft_config())["d2t"])


def test_a_reduced_vocabulary_without_a_map_is_refused() -> None:
    with pytest.raises(DraftError, match="no d2t"):
        read_contract(draft_config(), None)


def test_a_whole_vocabulary_needs_no_map() -> None:
    config = draft_config(draft_vocab_size=50)
    tensors = draft_tensors(config)
    with_map = read_contract(config, tensors.pop("d2t"))
    del tensors["t2d"]
    contract = read_contract(config, None)
    assert contract == with_map
    validate_tensors(contract, tensors)
    assert target_ids(contract, tensors).tolist() == list(range(50))


def test_both_spellings_of_rope_give_one_contract() -> None:
    d2t = draft_tensors(draft_config())["d2t"]
    plain = read_contract(draft_config(rope_theta=7.0), d2t)
    nested = draft_config(rope_theta=None, rope_parameters={"rope_theta": 7.0, "rope_type": "default"})
    assert read_contract(nested, d2t) == plain
    scaled = {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}
    assert read_contract(draft_config(rope_parameters=scaled), d2t).differences(plain)[0].startswith("rope_scaling")


def test_the_map_is_part_of_the_contract_and_may_change_in_a_hot_swap() -> None:
    d2t = draft_tensors(draft_config())["d2t"]
    one, two = read_contract(draft_config(), d2t), read_contract(draft_config(), d2t + 1)
    assert one.differences(two) == (f"vocab_map: {one.vocab_map} != {two.vocab_map}",)
    assert one.differences(two, hot_swap=True) == ()


def broken(name: str) -> dict[str, torch.Tensor]:
    tensors = draft_tensors(draft_config())
    nan, fc = tensors["lm_head.weight"].clone(), tensors["fc.weight"]
    nan[3, 2] = float("nan")
    flipped = tensors["t2d"].clone()
    flipped[1] = True
    twice = tensors["d2t"].clone()
    twice[1] = twice[0] - 1
    absolute = tensors["d2t"] + 2 * torch.arange(20)
    change: dict[str, dict[str, torch.Tensor | None]] = {
        "no_lm_head": {"lm_head.weight": None},
        "no_q_proj": {"midlayer.self_attn.q_proj.weight": None},
        "no_t2d": {"t2d": None},
        "embedding": {"embed_tokens.weight": torch.zeros(50, 16, dtype=torch.bfloat16)},
        "unknown": {"midlayer.extra.weight": torch.zeros(2, dtype=torch.bfloat16)},
        "shape": {"fc.weight": fc[:, :-1]},
        "integers": {"fc.weight": fc.to(torch.int32)},
        "mixed_dtypes": {"norm.weight": torch.ones(16)},
        "nan": {"lm_head.weight": nan},
        "inf": {"norm.weight": torch.full((16,), float("inf"), dtype=torch.bfloat16)},
        "short_map": {"d2t": tensors["d2t"].to(torch.int32)},
        "t2d_as_integers": {"t2d": tensors["t2d"].to(torch.int64)},
        "map_of_absolute_ids": {"d2t": absolute},
        "map_negative": {"d2t": tensors["d2t"] - 1},
        "map_not_unique": {"d2t": twice},
        "t2d_of_another_map": {"t2d": flipped},
    }
    return {k: v for k, v in (tensors | change[name]).items() if v is not None}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_lm_head", r"missing \['lm_head.weight'\]"),
        ("no_q_proj", "q_proj"),
        ("no_t2d", r"missing \['t2d'\]"),
        ("embedding", "belongs to the target"),
        ("unknown", r"unknown \['midlayer.extra.weight'\]"),
        ("shape", r"fc.weight: shape \(16, 47\)"),
        ("integers", "fc.weight: dtype"),
        ("mixed_dtypes", "norm.weight: dtype torch.float32"),
        ("nan", "lm_head.weight: 1 of 320 values are not finite"),
        ("inf", "norm.weight: 16 of 16"),
        ("short_map", "d2t: dtype"),
        ("t2d_as_integers", "t2d: dtype"),
        ("map_of_absolute_ids", "leave the vocabulary"),
        ("map_negative", "leave the vocabulary"),
        ("map_not_unique", "two draft ids"),
        ("t2d_of_another_map", "disagree on 1 target ids"),
    ],
)
def test_tensors_that_are_no_whole_draft_are_refused_by_name(kind: str, message: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "draft", draft_config(), broken(kind))
    with pytest.raises(DraftError, match=message):
        load_draft(folder)


def test_only_an_engine_that_starts_may_leave_out_the_embedding(tmp_path: Path) -> None:
    folder = put(tmp_path / "draft", draft_config(), broken("embedding"))
    assert "embed_tokens.weight" not in load_draft(folder, drop_embedding=True).tensors


@pytest.mark.parametrize(("file", "content"), [("config.json", b"{"), ("config.json", b"[]"), ("config.json", None)])
def test_a_broken_config_file_is_a_draft_error(file: str, content: bytes | None, tmp_path: Path) -> None:
    folder, _ = write_draft(tmp_path, draft_config(), draft_tensors(draft_config()))
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(DraftError, match=file):
        load_draft(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights_are_a_draft_error(keep: int, tmp_path: Path) -> None:
    folder, _ = write_draft(tmp_path, draft_config(), draft_tensors(draft_config()))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(DraftError, match=r"no safetensors file"):
        load_draft(folder)


def test_another_digest_than_asked_for_is_refused(tmp_path: Path) -> None:
    folder, _ = write_draft(tmp_path, draft_config(), draft_tensors(draft_config()))
    with pytest.raises(DraftError, match="was asked for"):
        load_draft(folder, expected="0" * 64)


def test_a_record_travels_with_its_draft(tmp_path: Path) -> None:
    folder, _ = write_draft(tmp_path, draft_config(), draft_tensors(draft_config()))
    assert load_draft(folder).record is None
    record = record_of(load_draft(folder), trained_tokens=7)
    write_record(folder, record)
    assert load_draft(folder).record == record


def test_a_record_of_another_draft_or_contract_is_refused(tmp_path: Path) -> None:
    folder, _ = write_draft(tmp_path, draft_config(), draft_tensors(draft_config()))
    draft = load_draft(folder)
    with pytest.raises(DraftError, match="its record is of draft"):
        write_record(folder, record_of(draft, digest="0" * 64))
    with pytest.raises(ContractMismatch, match="rope_theta"):
        write_record(folder, record_of(draft, contract=draft.contract.model_copy(update={"rope_theta": 3.0})))
    (folder / "draft.json").write_text("{}")
    with pytest.raises(DraftError, match=r"draft\.json"):
        load_draft(folder)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 49), min_size=20, max_size=20), st.randoms())
def test_any_set_of_target_ids_in_any_order_is_a_map(ids: set[int], random: Any) -> None:
    order = sorted(ids)
    random.shuffle(order)
    tensors = draft_tensors(draft_config())
    tensors["d2t"] = torch.tensor(order) - torch.arange(20)
    tensors["t2d"] = torch.zeros(50, dtype=torch.bool).index_fill(0, torch.tensor(order), True)
    contract = read_contract(draft_config(), tensors["d2t"])
    validate_tensors(contract, tensors)
    assert target_ids(contract, tensors).tolist() == order


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 19), st.integers(-60, 60).filter(bool))
def test_one_shifted_entry_of_the_map_is_always_refused(at: int, shift: int) -> None:
    tensors = draft_tensors(draft_config())
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][at] += shift
    with pytest.raises(DraftError, match="d2t"):
        validate_tensors(read_contract(draft_config(), tensors["d2t"]), tensors)


def test_the_toy_is_of_the_shapes_it_claims() -> None:
    contract = read_contract(draft_config(), draft_tensors(draft_config())["d2t"])
    assert {name: getattr(contract, name) for name in TOY} == TOY
