"""The shape of a draft for an 8B model of the Llama family: what published measurements were made with."""

from __future__ import annotations

from tide.domain import DraftContract


def contract(**changes: int) -> DraftContract:
    """Its contract, some fields changed."""
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "vocab_size": 128_256,
        "draft_vocab_size": 32_000,
        "target_hidden_size": 4096,
        **changes,
    }
    return DraftContract.model_validate(
        {
            **fields,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "aux_layers": (1, 15, 28),
            "vocab_map": "0" * 64,
        }
    )
