"""A tiny target model on disk, real in every part but its size and its training: for running the real trainer quickly.

Eight layers, 64 wide, 512 tokens, random weights. Its answers are greedy, so that a draft can learn them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny import request_info
from tide.domain import Split
from tide.models.target_files import eagle3_layers
from tide.states.shards import RequestStates

VOCAB, LAYERS = 512, 8


def tiny_target(folder: Path) -> Path:
    """A Hugging Face folder with an index, tied head and a stand-in tokenizer file; the same bytes every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@torch.no_grad()
def tiny_target_states(model: Path, count: int, *, prompt: int = 12, generated: int = 24) -> list[RequestStates]:
    """Requests of random prompts with the target's own greedy answers, of training conversations."""
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.randint(3, VOCAB, (count, prompt), generator=torch.Generator().manual_seed(1))
    for _ in range(generated):
        ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], dim=1)
    out = network(ids[:, :-1], output_hidden_states=True)
    aux = torch.cat([out.hidden_states[layer + 1] for layer in eagle3_layers(model)], dim=-1).bfloat16()
    return [
        RequestStates(
            info=request_info(f"request-{i}", Split.TRAIN),
            input_ids=ids[i, :-1].int(),
            last_token=int(ids[i, -1]),
            first_row=0,
            prompt_len=prompt,
            aux_hidden=aux[i].contiguous(),
            last_hidden=out.hidden_states[-1][i].bfloat16(),
        )
        for i in range(count)
    ]
