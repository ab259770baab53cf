"""Logged states made by transformers itself: what capture would have written, for tests of training and evaluation.

Knows nothing of SGLang. Greedy; computed in float32 (three times as fast as bfloat16 on a CPU without AMX) and stored
in bfloat16. Answers come from a padded batch, the states from a pass over each request alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.models import ensure_target_model
from tests.support.tiny import conversation
from tide.domain import Shard, ShardRequest, Split, TargetContract
from tide.models.target_files import target_contract
from tide.states.shards import RequestStates, write_shard

AUX_LAYERS = (1, 14, 26)
"""Layer outputs captured of the 30-layer target: transformers' ``hidden_states[2]``, ``[15]`` and ``[27]``."""

PROMPTS = (
    "What is the capital of France?",
    "Name three uses of copper.",
    "Write one sentence about the sea.",
    "Explain gravity in two sentences.",
    "Which language is spoken in Brazil?",
    "Why is sleep important?",
    "Give me two facts about bees.",
    "List three cities in Japan.",
    "Write a Python function that adds two numbers.",
    "Describe a rainbow briefly.",
    "What do plants need to grow?",
    "Tell me how a battery works.",
)


def make_states(
    model: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    split: Split = Split.TRAIN,
    slice: str = "chat",
) -> list[RequestStates]:
    """States of greedy answers to single-turn chats, one request a prompt, whole prompts included.

    The same arguments give the same objects within a test session: do not write into them.

    Args:
        model: Hugging Face folder of the target.
        split: every request's conversation falls into this split.
    """
    return list(_make_states(model.resolve(), tuple(prompts), max_new_tokens, split, slice))


def make_shard(
    folder: Path,
    model: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    split: Split = Split.TRAIN,
    slice: str = "chat",
) -> tuple[Path, Shard]:
    """One shard of ``make_states``, written with its manifest; returns the safetensors file and the manifest."""
    states = make_states(model, prompts, max_new_tokens, split=split, slice=slice)
    shard = write_shard(folder, states, split=split, target=contract_of(model), opened_at=1.0, closed_at=2.0)
    return folder / shard.file, shard


@cache
def contract_of(model: Path) -> TargetContract:
    """Target contract of the model as these states were made."""
    return target_contract(model, AUX_LAYERS, "bfloat16")


def target_model() -> Path:
    """The target model of the tests: converted once into ``TIDE_HOME`` (default ``.tide``) and reused."""
    return ensure_target_model(Path(os.environ.get("TIDE_HOME", ".tide")))


@cache
def _load(model: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), tokenizer


@cache
def _make_states(
    model: Path, prompts: tuple[str, ...], max_new_tokens: int, split: Split, slice: str
) -> tuple[RequestStates, ...]:
    answers = _generate(model, prompts, max_new_tokens)
    return tuple(
        _states_of(model, _info(prompt, split, slice), prompt_ids, answer)
        for prompt, (prompt_ids, answer) in zip(prompts, answers, strict=True)
    )


def _info(prompt: str, split: Split, slice: str) -> ShardRequest:
    request = hashlib.sha256(f"{prompt}/{split}".encode()).hexdigest()[:32]
    return ShardRequest(
        request=request, conversation=conversation(prompt, split), slice=slice, draft="none", sampling="greedy"
    )


@torch.no_grad()
def _generate(model: Path, prompts: tuple[str, ...], max_new_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    network, tokenizer = _load(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = network.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    width = batch.input_ids.shape[1]
    pairs = []
    for row, mask in zip(out, batch.attention_mask, strict=True):
        answer = row[width:]
        ends = (answer == tokenizer.eos_token_id).nonzero().flatten()
        answer = answer[: int(ends[0]) + 1] if len(ends) else answer
        pairs.append((row[:width][mask.bool()], answer))
    return pairs


@torch.no_grad()
def _states_of(model: Path, info: ShardRequest, prompt: torch.Tensor, answer: torch.Tensor) -> RequestStates:
    network, _ = _load(model)
    ids = torch.cat([prompt, answer])
    out = network(ids[None, :-1], output_hidden_states=True, use_cache=False)
    aux = torch.cat([out.hidden_states[layer + 1][0] for layer in AUX_LAYERS], dim=-1)
    return RequestStates(
        info=info,
        input_ids=ids[:-1].to(torch.int32),
        last_token=int(ids[-1]),
        first_row=0,
        prompt_len=len(prompt),
        aux_hidden=aux.to(torch.bfloat16).contiguous(),
        last_hidden=out.hidden_states[-1][0].to(torch.bfloat16).contiguous(),
    )
