"""The figures of the worked example, derived: ``python -m infra.pools.figures`` prints the table of its README.

Owns nothing but the arithmetic's order: sizes come from the policy, the target's configuration and tide.trainer.memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tide.config import Policy
from tide.domain import DraftContract
from tide.models.draft_format import read_contract
from tide.models.target_files import eagle3_layers, read_config
from tide.trainer.initial import draft_config
from tide.trainer.memory import (
    disk_bytes,
    parameters,
    shared_memory_bytes,
    state_bytes_a_row,
    training_memory,
)
from tide.trainer.run_config import shares
from tide.trainer.vocabulary import Vocabulary

EXAMPLE = Path(__file__).parent / "gpt-oss-120b"
GCD_BYTES = 64e9
"""HBM2e of one GCD: an MI250 has 128 GB and two of them (AMD Instinct MI250 data sheet)."""
_BF16 = 2


def example_draft(target: Path, policy: Policy) -> dict[str, Any]:
    """Content of ``config.json`` of a first draft for the target whose ``config.json`` lies in a folder."""
    return draft_config(target, eagle3_layers(target), policy.train.draft_vocab_size)


def contract(config: dict[str, Any]) -> DraftContract:
    """The contract of a draft of that configuration, with the lowest target ids as its vocabulary."""
    return read_contract(config, Vocabulary.of_low_ids(config["draft_vocab_size"], config["vocab_size"]).d2t)


def figures(target: Path, policy: Policy) -> dict[str, str]:
    """What a run on one node takes, as README.md tells it.

    Args:
        target: folder with the target's ``config.json``.
    """
    draft, train = contract(example_draft(target, policy)), policy.train
    ranks = train.ranks or 1
    at_once, accumulated = shares(train, ranks)
    shape = {"length": train.max_length, "batch": at_once, "ttt_length": train.ttt_length, "width": _BF16}
    flex = training_memory(draft, backend="flex_attention", **shape)
    sdpa = training_memory(draft, backend="sdpa", **shape)
    found = read_config(target)
    bundle = (2 * found["vocab_size"] + 1) * found["hidden_size"] * _BF16
    states = policy.train_tokens * state_bytes_a_row(found["hidden_size"])
    disk = disk_bytes(draft, tokens=policy.train_tokens, checkpoints=train.checkpoints, width=_BF16)
    shared = shared_memory_bytes(found["hidden_size"], length=train.max_length, batch=at_once, ranks=ranks, width=_BF16)
    return {
        "layers captured": ", ".join(map(str, draft.aux_layers)),
        "trainable parameters of the draft": f"{parameters(draft) / 1e6:.1f} M",
        "draft file, bfloat16": f"{parameters(draft) * _BF16 / 1e6:.0f} MB",
        "head-only bundle": f"{bundle / 1e9:.2f} GB",
        "spool and store, bytes a token": f"{state_bytes_a_row(found['hidden_size']):,}",
        "states of one training run": f"{states / 1e9:.1f} GB",
        "scratch of one training run": f"{disk / 1e9:.0f} GB",
        "shared memory (/dev/shm)": f"{shared / 1e9:.1f} GB",
        "samples a step": f"{train.batch_size} = {ranks} ranks x {at_once} x {accumulated}",
        "memory a GCD: weights, gradients, optimizer": f"{flex.weights / 1e9:.1f} GB",
        "memory a GCD: target's embedding and lm_head": f"{flex.frozen / 1e9:.1f} GB",
        "memory a GCD: activations": f"{flex.activations / 1e9:.1f} GB",
        "memory a GCD: logits and target distributions": f"{flex.vocabulary / 1e9:.1f} GB",
        "memory a GCD with flex_attention": f"{flex.total / 1e9:.1f} GB of {GCD_BYTES / 1e9:.0f} GB",
        "memory a GCD with sdpa (refused)": f"{sdpa.total / 1e9:.1f} GB of {GCD_BYTES / 1e9:.0f} GB",
        "longest samples with sdpa": f"{longest(draft, policy):,} rows",
    }


def longest(draft: DraftContract, policy: Policy) -> int:
    """Rows up to which ``sdpa`` would fit a GCD, in steps of 64."""
    at_once, _ = shares(policy.train, policy.train.ranks or 1)
    limit = GCD_BYTES * policy.train.preflight.memory_share

    def needs(length: int) -> int:
        return training_memory(
            draft, length=length, batch=at_once, ttt_length=policy.train.ttt_length, backend="sdpa", width=_BF16
        ).total

    lengths = range(64, policy.train.max_length + 1, 64)
    return max((length for length in lengths if needs(length) <= limit), default=0)


def table(rows: dict[str, str]) -> str:
    """The figures as README.md has them."""
    return "\n".join(["| what | figure |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def example_policy() -> Policy:
    """The example's policy file."""
    return Policy.load(EXAMPLE / "policy.yaml")


if __name__ == "__main__":
    print(table(figures(EXAMPLE / "target", example_policy())))
