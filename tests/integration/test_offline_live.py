"""Acceptance that the walk predicts against what a real SGLang counts on the same requests.

The draft is first fitted to a few answers, so that it really accepts; the target runs in float32 on both sides, so that
SGLang and transformers give the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.sglang_server import SglangServer
from tests.support.states import AUX_LAYERS, PROMPTS
from tide.domain import ShardRequest
from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.drafting import Anchors, Beams
from tide.evaluator.eagle3 import score_request
from tide.models.draft_files import load_draft, write_draft
from tide.states.shards import RequestStates

pytestmark = pytest.mark.timeout(1500)

STEPS, TOKENS, REQUESTS, FITTING_STEPS = 3, 48, 8, 20


def answered(model: Path) -> tuple[list[str], list[RequestStates], torch.Tensor]:
    """Prompts, the states of their greedy answers in float32, and the target's embedding."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:REQUESTS]]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = network.generate(**batch, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        rows = [row[mask.logical_not().sum() :] for row, mask in zip(out, batch.attention_mask, strict=True)]
        return texts, [_states(network, str(i), ids) for i, ids in enumerate(rows)], network.model.embed_tokens.weight


def _states(network: Any, name: str, ids: torch.Tensor) -> RequestStates:
    hidden = network(ids[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    aux = torch.cat([hidden[layer + 1][0] for layer in AUX_LAYERS], dim=-1).to(torch.bfloat16)
    info = ShardRequest(request=name, conversation=name.zfill(8), slice="chat", draft="none")
    return RequestStates(info, ids[:-1].int(), int(ids[-1]), 0, len(ids) - TOKENS, aux, hidden[-1][0])


def fitted(folder: Path, parent: Path, states: Sequence[RequestStates], embedding: torch.Tensor) -> Path:
    """The parent after some steps of cross-entropy on its first proposal in these answers."""
    files = load_draft(parent)
    draft = Eagle3Draft(files, embedding.clone())
    place = {int(target): index for index, target in enumerate(files.target_ids)}
    optimiser = torch.optim.Adam([w.requires_grad_() for w in draft.weights.values()], lr=1e-3)
    for step in range(FITTING_STEPS * len(states)):
        item = states[step % len(states)]
        ids = [*item.input_ids.tolist(), item.last_token]
        anchors = [i for i in range(item.prompt_len - 1, len(ids) - 2) if ids[i + 2] in place]
        prefix = draft.prefix(item.aux_hidden[:-1].clone(), torch.tensor(ids[1:-1]))
        logits = Beams(draft, [Anchors(prefix, torch.tensor(anchors))]).logits()[:, 0]
        optimiser.zero_grad()
        F.cross_entropy(logits, torch.tensor([place[ids[i + 2]] for i in anchors])).backward()
        optimiser.step()
    weights = {name: w.detach().to(torch.bfloat16) for name, w in draft.weights.items()}
    return write_draft(folder, files.config, files.tensors | weights)[0]


@dataclass(frozen=True)
class Fitted:
    """A draft that really accepts, and the answers it was fitted to."""

    draft: Path
    texts: list[str]
    states: list[RequestStates]
    embedding: torch.Tensor


@pytest.fixture(scope="module")
def case(target_model: Path, random_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    texts, states, embedding = answered(target_model)
    draft = fitted(tmp_path_factory.mktemp("fitted") / "drafts", random_draft, states, embedding)
    return Fitted(draft, texts, states, embedding)


@pytest.mark.parametrize(("topk", "draft_tokens"), [(1, STEPS + 1), (4, 8)], ids=["chain", "tree"])
def test_the_walk_agrees_with_what_sglang_counts(
    case: Fitted, target_model: Path, tmp_path: Path, topk: int, draft_tokens: int
) -> None:
    draft, states = case.draft, case.states
    with SglangServer(
        tmp_path, target_model, draft=draft, dtype="float32", steps=STEPS, topk=topk, draft_tokens=draft_tokens
    ) as server:
        live = server.generate(case.texts, TOKENS)
    offline, served = [], []
    module = Eagle3Draft(load_draft(draft), case.embedding)
    for item, answer in zip(states, live, strict=True):
        if answer["output_ids"] == [*item.input_ids.tolist(), item.last_token][item.prompt_len :]:
            with torch.inference_mode():
                offline.append(score_request(module, item, STEPS, topk, draft_tokens))
            served.append(answer["meta_info"])
    assert len(served) >= REQUESTS - 2, "SGLang and transformers answer differently: nothing to compare"
    predicted = sum(w.tokens for w in offline) / sum(w.verify_steps for w in offline)
    counted = sum(m["completion_tokens"] for m in served) / sum(m["spec_verify_ct"] for m in served)
    print(f"\nwalk {predicted:.4f} live {counted:.4f} on {len(served)} requests")
    assert counted > 1.5, "the draft is hardly ever right: the comparison shows nothing"
    assert predicted == pytest.approx(counted, rel=0.02)
    assert [w.tokens for w in offline] == [m["completion_tokens"] for m in served]
