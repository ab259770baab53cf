from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import (
    TARGET,
    embedding_of,
    propose,
    request_info,
    tiny_bundle,
    tiny_draft,
    tiny_shard,
    tiny_states,
)
from tide.domain import DraftModel, EvalReport, Split
from tide.draft_files import load_draft, write_record
from tide.errors import ContractMismatch, DraftError, EvaluationError
from tide.evaluator import eagle3
from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.eagle3 import Eagle3Evaluator, right_proposals, score_request
from tide.shards import RequestStates

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
    draft: Path, shards: list[Path], bundle: Path, split: Split = Split.GATE, steps: int = STEPS
) -> EvalReport:
    return Eagle3Evaluator().evaluate(draft, shards, bundle=bundle, split=split, steps=steps, states_commit="c1")


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


def test_anchors_in_blocks_give_what_all_at_once_gives(
    draft: Path, bundle: Path, module: Eagle3Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = tiny_states(draft, bundle, 1, generated=30)
    whole = right_proposals(module, states, STEPS)
    monkeypatch.setattr(eagle3, "MAX_SCORES", 4 * 35 * 3)
    assert right_proposals(module, states, STEPS).tolist() == whole.tolist()


def test_a_longer_chain_accepts_at_least_as_much(draft: Path, bundle: Path, module: Eagle3Draft) -> None:
    states = tiny_states(draft, bundle, 2, generated=40)
    one, three = right_proposals(module, states, 1), right_proposals(module, states, 3)
    assert (three >= one).all()
    assert (one == three.clip(max=1)).all()
    assert three.max() > 1


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


@pytest.mark.parametrize(("steps", "topk"), [(0, 1), (3, 2)])
def test_what_cannot_be_walked_is_said(draft: Path, bundle: Path, steps: int, topk: int) -> None:
    with pytest.raises(EvaluationError, match="chains"):
        Eagle3Evaluator().evaluate(draft, [], bundle=bundle, split=Split.GATE, steps=steps, topk=topk)


def test_an_unknown_rope_scaling_is_refused(tmp_path: Path, bundle: Path) -> None:
    folder = tiny_draft(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(DraftError, match="yarn"):
        Eagle3Draft(load_draft(folder), embedding_of(bundle))


def test_another_activation_is_refused(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(DraftError, match="gelu"):
        Eagle3Draft(load_draft(tiny_draft(tmp_path, hidden_act="gelu")), embedding_of(bundle))
