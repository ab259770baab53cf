"""Speculative decoding on the CPU changes nothing: token for token the plain output, with drafts that are accepted.

In float32, since in bfloat16 rounding differs between batch shapes. The draft's weights are random; the test plugin
`engine_plugin` biases its logits with the plain output. For the tree the right token is only second best after odd ids,
so that accepted paths really leave the first branch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.sglang_server import SglangServer

TOPICS = ["the sea", "a compiler", "old bridges", "how bread rises", "the moon", "a chess game", "wool", "a small town"]
FORMS = ["Tell me about {}.", "Write a short poem about {}.", "List three facts about {}:", "Once upon a time, {}"]
PROMPTS = [form.format(topic) for form in FORMS for topic in TOPICS]
TOKENS = 32

Ids = list[list[int]]


@pytest.fixture(scope="module")
def prompts(target_model: Path) -> Ids:
    """Token ids of 32 different prompts."""
    tokenizer = Tokenizer.from_file(str(target_model / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(prompts: Ids, target_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ids:
    """What the target model says by itself."""
    with SglangServer(tmp_path_factory.mktemp("plain"), target_model, dtype="float32") as server:
        return [answer["output_ids"] for answer in server.generate(prompts, TOKENS)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("shape", "env"),
    [
        pytest.param({"steps": 3, "topk": 1, "draft_tokens": 4}, {"TIDE_CPU_OVERLAP": "1"}, id="chain"),
        pytest.param({"steps": 3, "topk": 4, "draft_tokens": 8}, {"TIDE_TEST_SECOND_BEST": "1"}, id="tree"),
    ],
)
def test_speculative_output_is_the_plain_output_token_for_token(
    shape: dict[str, int],
    env: dict[str, str],
    prompts: Ids,
    plain: Ids,
    target_model: Path,
    random_draft: Path,
    tmp_path: Path,
) -> None:
    sequences = tmp_path / "sequences.json"
    sequences.write_text(json.dumps([prompt + output for prompt, output in zip(prompts, plain, strict=True)]))
    env = {**env, "TIDE_TEST_SEQUENCES": str(sequences)}
    with SglangServer(tmp_path, target_model, draft=random_draft, dtype="float32", env=env, **shape) as server:
        answers = server.generate(prompts, TOKENS)
    assert [answer["output_ids"] for answer in answers] == plain
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert TOKENS * len(prompts) / steps > 2, "the drafts were hardly accepted, so that this has shown nothing"
