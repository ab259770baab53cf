"""The worked example, gpt-oss-120b on a node with 4 MI250: its files agree with code, vendors and one another."""

from __future__ import annotations

import json

import torch
import yaml
from transformers import GptOssConfig

from infra.pools.figures import EXAMPLE, GCD_BYTES, contract, example_draft, example_policy, figures, longest, table
from tide.evaluator.draft_module import rope_frequencies
from tide.models.draft_format import read_contract
from tide.models.target_files import read_config
from tide.trainer.hardware import Hardware
from tide.trainer.preflight import memory
from tide.trainer.vocabulary import Vocabulary

TARGET = EXAMPLE / "target"
DRAFT = json.loads((EXAMPLE / "draft" / "config.json").read_text())
POLICY = example_policy()


def test_the_target_is_the_one_that_transformers_knows() -> None:
    """GptOssConfig's defaults are gpt-oss-120b's."""
    theirs, ours = GptOssConfig().to_dict(), read_config(TARGET)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    names += ("rms_norm_eps", "max_position_embeddings", "num_local_experts", "intermediate_size", "hidden_act")
    assert {n: ours[n] for n in names} == {n: theirs[n] for n in names}
    rope = theirs.get("rope_parameters") or theirs["rope_scaling"]
    assert ours["rope_scaling"].items() <= {**rope, "truncate": rope.get("truncate", False)}.items()


def test_the_drafts_configuration_is_what_training_would_write() -> None:
    assert example_draft(TARGET, POLICY) == DRAFT


def test_the_draft_keeps_its_contract_with_the_target_and_all_its_readers_agree_on_its_angles() -> None:
    found = read_contract(DRAFT, Vocabulary.of_low_ids(DRAFT["draft_vocab_size"], DRAFT["vocab_size"]).d2t)
    assert (found.target_hidden_size, found.vocab_size, found.aux_layers) == (2880, 201_088, (1, 17, 32))
    assert found.rope_scaling is None, "the target's YaRN is not computed alike by trainer, engine and walk"
    plain = 150_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    torch.testing.assert_close(rope_frequencies(found), plain)


def test_the_policy_names_only_parameters_and_says_nothing_that_is_the_default_of_training() -> None:
    named = yaml.safe_load((EXAMPLE / "policy.yaml").read_text())["train"]
    assert named["ranks"] * named["device_batch_size"] == named["batch_size"]
    assert POLICY.train.max_length == 2048
    assert POLICY.train.draft_vocab_size == DRAFT["draft_vocab_size"]


def test_a_run_fits_a_gcd_with_flex_attention_and_is_refused_with_sdpa() -> None:
    draft, node = contract(DRAFT), Hardware("gpu", 8)
    assert memory(draft, POLICY.train, node, int(GCD_BYTES)).state == "ok"
    sdpa = POLICY.train.model_copy(update={"attention_backend": "sdpa"})
    assert memory(draft, sdpa, node, int(GCD_BYTES)).state == "wrong"
    shorter = sdpa.model_copy(update={"max_length": longest(draft, POLICY)})
    assert memory(draft, shorter, node, int(GCD_BYTES)).state == "ok"


def test_the_readmes_figures_are_those_of_the_code() -> None:
    found = figures(TARGET, POLICY)
    assert table(found) in (EXAMPLE / "README.md").read_text()
    assert found["head-only bundle"] == "2.32 GB"
    assert found["spool and store, bytes a token"] == "23,056"
