from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.anchors import right_proposals, walk
from tests.support.tiny import (
    DRAFT_VOCAB,
    TARGET,
    VOCAB,
    embedding_of,
    propose,
    request_info,
    tiny_bundle,
    tiny_draft,
    tiny_shard,
    tiny_states,
)
from tests.support.tiny_tree import propose_tree, verify
from tide.domain import DraftModel, EvalReport, Split
from tide.errors import ContractMismatch, DraftError, EvaluationError
from tide.evaluator import drafting, target, walker
from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.eagle3 import Eagle3Evaluator, score_request
from tide.evaluator.target import SampledTarget
from tide.evaluator.tree import TreeShape
from tide.evaluator.walker import Walker
from tide.models.draft_files import load_draft, write_record
from tide.states.shards import RequestStates

STEPS = 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def module(draft: Path, bundle: Path) -> Eagle3Draft:
    return Eagle3Draft(load_draft(draft), embedding_of(bundle))


def evaluate(
    draft: Path, shards: list[Path], bundle: Path, split: Split = Split.GATE, steps: int = STEPS, **serving: Any
) -> EvalReport:
    return Eagle3Evaluator().evaluate(
        draft, shards, bundle=bundle, split=split, steps=steps, states_commit="c1", **serving
    )


def sequential_walk(draft: Path, bundle: Path, states: RequestStates, steps: int) -> tuple[int, int, int]:
    """(tokens, verify steps, accepted) as a server counts them: one verify step after the other."""
    tensors, embedding = load_draft(draft).tensors, embedding_of(bundle)
    ids = [*states.input_ids.tolist(), states.last_token]
    newest = states.prompt_len - states.first_row  # index of the token that prefill generated
    tokens, verified, accepted = 1, 0, 0
    while newest < len(ids) - 1:
        proposed = propose(tensors, embedding, states.aux_hidden, ids[: newest + 1], newest - 1, steps=steps)
        right = 0
        for offset, token in enumerate(proposed):
            if newest + 1 + offset >= len(ids) or ids[newest + 1 + offset] != token:
                break
            right += 1
        emitted = min(right + 1, len(ids) - 1 - newest)  # the bonus token, unless the answer ended before it
        verified, accepted, tokens, newest = verified + 1, accepted + right, tokens + emitted, newest + right + 1
    return tokens, verified, accepted


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("first_row", [0, 4])
def test_a_request_is_walked_as_one_verify_step_after_the_other_would(
    draft: Path, bundle: Path, module: Eagle3Draft, seed: int, first_row: int
) -> None:
    states = tiny_states(draft, bundle, seed, prompt=8, generated=16 + seed, first_row=first_row)
    score = score_request(module, states, STEPS)
    assert (score.tokens, score.verify_steps, score.accepted) == sequential_walk(draft, bundle, states, STEPS)
    assert score.tokens == 16 + seed
    assert score.proposed == STEPS * score.verify_steps


def test_the_walks_of_these_states_really_jump(draft: Path, bundle: Path, module: Eagle3Draft) -> None:
    scores = [score_request(module, tiny_states(draft, bundle, seed), STEPS) for seed in range(6)]
    assert sum(s.tokens for s in scores) / sum(s.verify_steps for s in scores) > 1.5
    assert len({s.verify_steps for s in scores}) > 1


def tree_walk(draft: Path, bundle: Path, states: RequestStates, shape: TreeShape) -> tuple[int, int, int]:
    """(tokens, verify steps, accepted), one verify step after the other, by plain loops."""
    tensors, embedding = load_draft(draft).tensors, embedding_of(bundle)
    ids = [*states.input_ids.tolist(), states.last_token]
    newest = states.prompt_len - states.first_row
    tokens, verified, accepted = len(ids) - newest, 0, 0
    while newest < len(ids) - 1:
        found = propose_tree(tensors, embedding, states.aux_hidden, ids, newest - 1, steps=shape.steps, topk=shape.topk)
        right = verify(found, shape.draft_tokens, ids[newest + 1 :])
        verified, accepted, newest = verified + 1, accepted + right, newest + right + 1
    return tokens, verified, accepted


@pytest.mark.parametrize("shape", [TreeShape(3, 2, 8), TreeShape(4, 3, 9), TreeShape(2, 4, 21), TreeShape(1, 3, 3)])
def test_a_tree_is_walked_as_one_verify_step_after_the_other_would(draft: Path, bundle: Path, shape: TreeShape) -> None:
    module = Eagle3Draft(load_draft(draft), embedding_of(bundle))
    states = [tiny_states(draft, bundle, 20 + n, generated=9 + n, first_row=n % 3) for n in range(4)]
    for one, (_, found) in zip(states, Walker(module, shape).walk(states), strict=True):
        assert (found.tokens, found.verify_steps, found.accepted) == tree_walk(draft, bundle, one, shape)


def test_a_tree_accepts_more_than_the_chain_in_it(tmp_path: Path, draft: Path, bundle: Path) -> None:
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, seed, follow=0.4) for seed in range(6)])
    chain = evaluate(draft, [shard], bundle)
    tree = evaluate(draft, [shard], bundle, topk=4, draft_tokens=30)
    assert tree.acceptance_length > chain.acceptance_length
    assert (chain.topk, chain.draft_tokens, tree.topk, tree.draft_tokens) == (1, None, 4, 30)
    assert all(score.proposed == 29 * score.verify_steps for score in tree.scores)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_visited_anchors_of_requests_together_are_those_of_every_anchor_alone(
    draft: Path, bundle: Path, module: Eagle3Draft, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [tiny_states(draft, bundle, seed, generated=5 + 9 * seed, first_row=seed) for seed in range(5)]
    expected = [walk(right_proposals(module, one, steps)) for one in states]
    for rows, scores in ((1, 1), (40, 500), (10**6, 10**6)):
        monkeypatch.setattr(walker, "MAX_ROWS", rows)
        monkeypatch.setattr(drafting, "MAX_SCORES", scores)
        monkeypatch.setattr(drafting, "LOGIT_ROWS", rows)
        found = [w for _, w in Walker(module, TreeShape(steps, 1, steps + 1)).walk(states)]
        assert [(w.tokens, w.verify_steps, w.accepted) for w in found] == expected


def test_a_longer_chain_accepts_at_least_as_much(draft: Path, bundle: Path, module: Eagle3Draft) -> None:
    states = tiny_states(draft, bundle, 2, generated=40)
    one, three = right_proposals(module, states, 1), right_proposals(module, states, 3)
    assert [min(n, 1) for n in three] == one
    assert max(three) > 1


def test_depths_add_up_to_what_was_accepted(draft: Path, bundle: Path, module: Eagle3Draft) -> None:
    score = score_request(module, tiny_states(draft, bundle, 3, generated=40), STEPS)
    assert len(score.accepted_at) == STEPS
    assert sum(score.accepted_at) == score.accepted > 0
    assert list(score.accepted_at) == sorted(score.accepted_at, reverse=True)
    assert score.prompt_tokens == 6


# --- temperature above 0 -----------------------------------------------------------------------------------------


def sampled_states(draft: Path, bundle: Path, seed: int, sure: float = 0.0) -> RequestStates:
    """A sampled request; ``sure`` is how strongly the target's logits point to the logged tokens."""
    info = request_info(f"sampled-{seed}", sampling="sampled")
    states = tiny_states(draft, bundle, seed, generated=30, info=info)
    embedding = embedding_of(bundle)
    pointing = embedding[states.next_ids().long()] / embedding[states.next_ids().long()].norm(dim=-1, keepdim=True) ** 2
    return replace(states, last_hidden=(sure * pointing).to(torch.bfloat16))


def test_a_target_sure_of_its_tokens_is_expected_to_accept_what_was_right(
    tmp_path: Path, draft: Path, bundle: Path
) -> None:
    states = [sampled_states(draft, bundle, seed, sure=1.0) for seed in range(4)]
    greedy = [replace(s, info=request_info(s.info.request)) for s in states]
    counted = evaluate(draft, [tiny_shard(tmp_path / "greedy", greedy)], bundle)
    expected = evaluate(draft, [tiny_shard(tmp_path / "sampled", states)], bundle, temperature=0.01)
    for ours, theirs in zip(expected.scores, counted.scores, strict=True):
        assert ours.verify_steps == pytest.approx(theirs.verify_steps)
        assert ours.accepted_at == pytest.approx(theirs.accepted_at)
        assert ours.proposed == pytest.approx(theirs.proposed)
        assert isinstance(theirs.verify_steps, int)
    assert (expected.sampling, counted.sampling) == ("temperature 0.01", "greedy")


@pytest.mark.parametrize(("topk", "draft_tokens"), [(1, None), (3, 10)])
def test_a_target_that_knows_nothing_accepts_each_proposal_offered_with_one_chance_in_its_vocabulary(
    tmp_path: Path, draft: Path, bundle: Path, topk: int, draft_tokens: int | None
) -> None:
    states = sampled_states(draft, bundle, 5)
    shard = tiny_shard(tmp_path, [states])
    (score,) = evaluate(draft, [shard], bundle, topk=topk, draft_tokens=draft_tokens, temperature=0.7).scores
    greedy = replace(states, info=request_info("same"))
    ((_, counted),) = Walker(
        Eagle3Draft(load_draft(draft), embedding_of(bundle)), TreeShape.of(STEPS, topk, draft_tokens, DRAFT_VOCAB)
    ).walk([greedy])
    first = score.accepted_at[0] / score.verify_steps
    roots = 1 if topk == 1 else 3  # of a tree's topk roots those that were kept
    assert 1 / VOCAB <= first * (1 + 1e-6) <= roots * (1 + 1e-6) / VOCAB * (1 + 1e-6)
    assert score.verify_steps + score.accepted == pytest.approx(counted.verify_steps + counted.accepted)
    assert score.verify_steps > counted.verify_steps


def test_the_chance_of_a_proposal_is_the_target_s_softmax_at_its_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "LOGIT_ROWS", 2)
    generator = torch.Generator().manual_seed(1)
    head, hidden = torch.randn((50, 8), generator=generator), torch.randn((5, 8), generator=generator)
    tokens = torch.stack([torch.randperm(50, generator=generator)[:3] for _ in range(5)])
    offered = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 1]]).bool()
    found = SampledTarget(head, 0.6).chances(hidden.bfloat16(), tokens, offered)
    shares = (hidden.bfloat16().double() @ head.double().T / 0.6).softmax(-1)
    expected = [sum(float(shares[i, tokens[i, j]]) for j in range(3) if offered[i, j]) for i in range(5)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_each_regime_walks_its_own_requests(tmp_path: Path, draft: Path, bundle: Path) -> None:
    states = [sampled_states(draft, bundle, 1), tiny_states(draft, bundle, 2, info=request_info("greedy"))]
    shard = tiny_shard(tmp_path, states)
    assert [s.request for s in evaluate(draft, [shard], bundle, temperature=1.0).scores] == ["sampled-1"]
    assert [s.request for s in evaluate(draft, [shard], bundle).scores] == ["greedy"]
    with pytest.raises(EvaluationError, match="no sampled request of the gate split"):
        evaluate(draft, [tiny_shard(tmp_path / "b", states[1:])], bundle, temperature=1.0)


@pytest.mark.parametrize(
    ("temperature", "name"), [(0.7, "temperature 0.70"), (1, "temperature 1.00"), (0.705, "temperature 0.705")]
)
def test_a_regime_is_named_by_its_temperature(
    tmp_path: Path, draft: Path, bundle: Path, temperature: float, name: str
) -> None:
    shard = tiny_shard(tmp_path, [sampled_states(draft, bundle, 1)])
    assert evaluate(draft, [shard], bundle, temperature=temperature).sampling == name


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_an_impossible_temperature_is_refused(draft: Path, bundle: Path, temperature: float) -> None:
    with pytest.raises(EvaluationError, match="temperature is"):
        evaluate(draft, [], bundle, temperature=temperature)


# --- which requests, and what is refused ---------------------------------------------------------------------------


def test_only_conversations_of_the_split_are_walked(tmp_path: Path, draft: Path, bundle: Path) -> None:
    infos = [request_info("g", Split.GATE), request_info("s", Split.SELECTION), request_info("h", Split.GATE)]
    states = [tiny_states(draft, bundle, i, info=info) for i, info in enumerate(infos)]
    shard = tiny_shard(tmp_path, states)
    assert [s.request for s in evaluate(draft, [shard], bundle).scores] == ["g", "h"]
    assert [s.request for s in evaluate(draft, [shard], bundle, Split.SELECTION).scores] == ["s"]


def test_the_report_names_what_it_is_comparable_with(tmp_path: Path, draft: Path, bundle: Path) -> None:
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, 0)])
    report = evaluate(draft, [shard], bundle)
    assert report.draft == draft.name
    assert (report.target, report.states_commit, report.steps, report.sampling) == (TARGET, "c1", STEPS, "greedy")


def test_a_training_conversation_among_the_held_out_ones_is_refused(tmp_path: Path, draft: Path, bundle: Path) -> None:
    states = [
        tiny_states(draft, bundle, i, info=request_info(f"r{i}", s)) for i, s in enumerate((Split.GATE, Split.TRAIN))
    ]
    with pytest.raises(EvaluationError, match="r1 is for training"):
        evaluate(draft, [tiny_shard(tmp_path, states)], bundle)


def test_a_shard_of_the_training_folder_is_refused(tmp_path: Path, draft: Path, bundle: Path) -> None:
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, 0)], Split.TRAIN)
    with pytest.raises(EvaluationError, match="of the train split"):
        evaluate(draft, [shard], bundle)


def test_a_split_without_requests_is_refused(tmp_path: Path, draft: Path, bundle: Path) -> None:
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, 0)])
    with pytest.raises(EvaluationError, match="no greedy request of the selection split"):
        evaluate(draft, [shard], bundle, Split.SELECTION)


def test_sampled_requests_and_answers_of_one_token_are_left_out(tmp_path: Path, draft: Path, bundle: Path) -> None:
    states = [
        tiny_states(draft, bundle, 0, info=request_info("sampled", sampling="sampled")),
        tiny_states(draft, bundle, 1, generated=1, info=request_info("short")),
        tiny_states(draft, bundle, 2, generated=2, info=request_info("two")),
    ]
    (score,) = evaluate(draft, [tiny_shard(tmp_path, states)], bundle).scores
    assert (score.request, score.tokens, score.verify_steps) == ("two", 2, 1)


def test_a_report_on_requests_of_unknown_sampling_does_not_claim_to_be_greedy(
    tmp_path: Path, draft: Path, bundle: Path
) -> None:
    states = [
        tiny_states(draft, bundle, i, info=request_info(s, sampling=s)) for i, s in enumerate(("greedy", "unknown"))
    ]
    assert evaluate(draft, [tiny_shard(tmp_path, states)], bundle).sampling == "unknown"


def test_one_request_in_two_shards_is_refused(tmp_path: Path, draft: Path, bundle: Path) -> None:
    info = request_info("twice")
    shards = [tiny_shard(tmp_path, [tiny_states(draft, bundle, seed, info=info)]) for seed in range(2)]
    with pytest.raises(EvaluationError, match="twice stands twice"):
        evaluate(draft, shards, bundle)


def test_a_shard_of_another_target_is_refused_by_part(tmp_path: Path, draft: Path, bundle: Path) -> None:
    other = TARGET.model_copy(update={"tokenizer": "c" * 64})
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, 0)], target=other)
    with pytest.raises(ContractMismatch, match="tokenizer"):
        evaluate(draft, [shard], bundle)


def test_a_draft_for_other_layers_is_refused_by_part(tmp_path: Path, draft: Path, bundle: Path) -> None:
    other = tiny_draft(tmp_path / "other", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    with pytest.raises(ContractMismatch, match="aux_layers"):
        evaluate(other, [tiny_shard(tmp_path, [tiny_states(draft, bundle, 0)])], bundle)


def test_a_draft_whose_record_names_another_target_is_refused(tmp_path: Path, bundle: Path) -> None:
    draft = tiny_draft(tmp_path / "drafts")
    target = TARGET.model_copy(update={"weights": "d" * 64})
    write_record(draft, DraftModel(digest=draft.name, contract=load_draft(draft).contract, target=target))
    with pytest.raises(ContractMismatch, match="weights"):
        evaluate(draft, [tiny_shard(tmp_path, [tiny_states(draft, bundle, 0)])], bundle)


@pytest.mark.parametrize(
    ("serving", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"topk": 0}, "topk"),
        ({"topk": 2}, "draft_tokens"),
        ({"topk": 2, "draft_tokens": 12}, "draft_tokens"),
        ({"topk": DRAFT_VOCAB + 1, "draft_tokens": 8}, "topk"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(
    draft: Path, bundle: Path, serving: dict[str, int], field: str
) -> None:
    with pytest.raises(EvaluationError, match=f"^{field} is"):
        evaluate(draft, [], bundle, **serving)


def test_an_unknown_rope_scaling_is_refused(tmp_path: Path, bundle: Path) -> None:
    folder = tiny_draft(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(DraftError, match="yarn"):
        Eagle3Draft(load_draft(folder), embedding_of(bundle))


def test_another_activation_is_refused(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(DraftError, match="gelu"):
        Eagle3Draft(load_draft(tiny_draft(tmp_path, hidden_act="gelu")), embedding_of(bundle))


# Named requests, whatever their split


def named(draft: Path, shards: list[Path], bundle: Path, *requests: str) -> list[str]:
    scores = Eagle3Evaluator().walk(draft, shards, set(requests), bundle=bundle, steps=STEPS)
    return [score.request for score in scores]


def test_named_requests_are_walked_as_in_a_report_whatever_their_split(
    draft: Path, bundle: Path, module: Eagle3Draft, tmp_path: Path
) -> None:
    states = [tiny_states(draft, bundle, seed, info=request_info(f"request-{seed}", Split.TRAIN)) for seed in range(3)]
    shard = tiny_shard(tmp_path / "train", states, Split.TRAIN)
    scores = Eagle3Evaluator().walk(draft, [shard], {"request-0", "request-2"}, bundle=bundle, steps=STEPS)
    assert scores == [score_request(module, states[0], STEPS), score_request(module, states[2], STEPS)]
    assert named(draft, [shard], bundle) == named(draft, [shard], bundle, "another") == []


def test_a_request_that_stands_in_two_shards_is_walked_once(draft: Path, bundle: Path, tmp_path: Path) -> None:
    states = [tiny_states(draft, bundle, seed) for seed in range(2)]
    shards = [tiny_shard(tmp_path, states), tiny_shard(tmp_path, states[:1])]
    assert sorted(named(draft, shards, bundle, "request-0", "request-1")) == ["request-0", "request-1"]


@pytest.mark.parametrize(("first_row", "walked"), [(3, True), (4, False)])
def test_a_request_without_most_of_its_prompt_is_not_walked(
    draft: Path, bundle: Path, tmp_path: Path, first_row: int, walked: bool
) -> None:
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, 1, prompt=6, first_row=first_row)])
    assert named(draft, [shard], bundle, "request-1") == (["request-1"] if walked else [])


def test_named_requests_of_another_target_are_refused(draft: Path, bundle: Path, tmp_path: Path) -> None:
    other = TARGET.model_copy(update={"weights": "0" * 64})
    shard = tiny_shard(tmp_path, [tiny_states(draft, bundle, 1)], target=other)
    with pytest.raises(ContractMismatch, match="weights"):
        named(draft, [shard], bundle, "request-1")
