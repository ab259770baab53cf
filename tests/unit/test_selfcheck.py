"""The start-up check: wrong configurations and hooks that did not take."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest

from tide.errors import ConfigError
from tide.sglang_plugin.selfcheck import (
    refuse_configuration,
    require_applied,
    require_flagged,
    require_resolvable,
)


def arguments(**changes: Any) -> Any:
    usual = {"speculative_algorithm": "EAGLE3", "pp_size": 1, "disaggregation_mode": "null", "device": "cuda"}
    return Some(**{**usual, **changes})


def test_the_usual_configuration_is_accepted() -> None:
    refuse_configuration(arguments())


@pytest.mark.parametrize(
    "change",
    [
        {"speculative_algorithm": None},
        {"speculative_algorithm": "EAGLE"},
        {"enable_multi_layer_eagle": True},
        {"decoupled_spec_role": "verifier"},
        {"pp_size": 2},
        {"disaggregation_mode": "prefill"},
        {"disaggregation_mode": "decode"},
        {"attn_cp_size": 2},
        {"dcp_size": 2},
        {"enable_attn_tp_input_scattered": True},
        {"attn_dp_size": 2},
        {"enable_two_batch_overlap": True},
        {"enable_pdmux": True},
        {"dllm_algorithm": "x"},
        {"is_embedding": True},
        {"device": "mps"},
    ],
)
def test_a_configuration_in_which_rows_would_be_wrong_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot capture") as refusal:
        refuse_configuration(arguments(**change))
    assert "TIDE_SPOOL_DIR" in str(refusal.value)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"pp_size=2.*enable_pdmux=True"):
        refuse_configuration(arguments(pp_size=2, enable_pdmux=True))


def test_a_name_that_sglang_lacks_is_reported() -> None:
    require_resolvable(("json.decoder.JSONDecoder.decode",))
    with pytest.raises(ConfigError, match=r"it has no json\.decoder\.JSONDecoder\.gone, no\.module\.here"):
        require_resolvable(("json.decoder.JSONDecoder.gone", "json.decoder.JSONDecoder.decode", "no.module.here"))


def test_a_hook_that_was_not_applied_is_reported() -> None:
    with pytest.raises(ConfigError, match="not applied: b"):
        require_applied(Some(_patched={"a"}), ("a", "b"))


def test_a_target_without_a_logits_processor_is_refused() -> None:
    require_flagged(1)
    with pytest.raises(ConfigError, match="LogitsProcessor"):
        require_flagged(0)
