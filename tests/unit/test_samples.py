"""Sample files: which rows are trained on, and which requests are refused by name (drill T2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import HIDDEN, TARGET, VOCAB, conversation, request_info
from tide.domain import Split
from tide.errors import BadInputError, ContractMismatch
from tide.states.shards import RequestStates, write_shard
from tide.trainer.samples import Cut, Samples, fault, materialise, supervised

CUT = Cut(prompt_rows=4, max_length=64)


def request(name: str, *, prompt: int = 6, generated: int = 5, first_row: int = 0, **changes: Any) -> RequestStates:
    rows = prompt + generated - 1 - first_row
    generator = torch.Generator().manual_seed(len(name))
    states = RequestStates(
        info=request_info(name, Split.TRAIN),
        input_ids=torch.arange(first_row, first_row + rows, dtype=torch.int32) % VOCAB,
        last_token=(first_row + rows) % VOCAB,
        first_row=first_row,
        prompt_len=prompt,
        aux_hidden=torch.randn((rows, 3 * HIDDEN), generator=generator).bfloat16(),
        last_hidden=torch.randn((rows, HIDDEN), generator=generator).bfloat16(),
    )
    return replace(states, **changes)


def shard(folder: Path, *states: RequestStates, split: Split = Split.TRAIN, closed_at: float = 2.0) -> Path:
    made = write_shard(folder, states, split=split, target=TARGET, opened_at=1.0, closed_at=closed_at)
    return folder / made.file


def make(tmp_path: Path, *shards: Path, cut: Cut = CUT, newest: int | None = None) -> Samples:
    return materialise(shards, tmp_path / "samples", target=TARGET, cut=cut, newest=newest)


def files(samples: Samples) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(samples.folder.rglob("*.ckpt"))]


def test_supervision_starts_one_token_before_the_first_generated_one_and_leaves_out_the_last_row() -> None:
    # Rows 0..9: the prompt is 0..5; the first draft step after it sits at row 5 and learns what follows token 6.
    assert supervised(request("a")).nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_a_sample_has_the_layout_that_specforge_reads(tmp_path: Path) -> None:
    states = request("a")
    (sample,) = files(make(tmp_path, shard(tmp_path / "in", states)))
    assert sample["input_ids"].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert sample["hidden_state"].shape == (1, 8, HIDDEN)
    assert torch.equal(sample["aux_hidden_state"][0], states.aux_hidden[2:])


def test_a_prompt_that_capture_has_trimmed_is_trimmed_no_further(tmp_path: Path) -> None:
    (sample,) = files(make(tmp_path, shard(tmp_path / "in", request("a", first_row=3))))
    assert sample["input_ids"].tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1, 0]


def test_a_long_answer_is_cut_and_its_last_row_is_not_supervised(tmp_path: Path) -> None:
    made = make(tmp_path, shard(tmp_path / "in", request("a", generated=30)), cut=Cut(4, 7))
    (sample,) = files(made)
    assert sample["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert made.tokens == 7


def test_captured_layers_are_saved_in_the_dtype_the_draft_computes_in(tmp_path: Path) -> None:
    (sample,) = files(make(tmp_path, shard(tmp_path / "in", request("a")), cut=Cut(4, 64, torch.float32)))
    assert sample["aux_hidden_state"].dtype == torch.float32
    assert sample["hidden_state"].dtype == torch.bfloat16


def test_a_sample_file_holds_its_own_rows_and_nothing_of_the_shard(tmp_path: Path) -> None:
    made = make(tmp_path, shard(tmp_path / "in", request("a", prompt=400), request("b", prompt=400)))
    for path in made.folder.rglob("*.ckpt"):
        assert path.stat().st_size < 8 * (4 * HIDDEN * 2 + 16) + 4096


def test_generated_tokens_are_counted_apart(tmp_path: Path) -> None:
    made = make(tmp_path, shard(tmp_path / "in", request("a")))
    assert made.generated.nonzero().flatten().tolist() == [6, 7, 8, 9]
    assert made.seen.nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


def poisoned() -> dict[str, RequestStates]:
    bad = request("nan").aux_hidden.clone()
    bad[3, 7] = float("nan")
    return {
        "zero mask": request("mask", generated=1),
        "not finite": request("nan", aux_hidden=bad),
        "short rows": request("short", prompt_len=40),
        "empty rows": request("empty", last_hidden=torch.zeros_like(request("empty").last_hidden)),
    }


def test_poisoned_requests_are_refused_by_name_and_the_rest_train(tmp_path: Path) -> None:
    good = [request(f"good-{i}") for i in range(6)]
    bad = poisoned()
    made = make(tmp_path, shard(tmp_path / "in", *good[:3], *bad.values(), *good[3:]))
    assert made.count == len(files(made)) == 6
    found = {r.request: r.reason.split(":")[0] for r in made.refused}
    assert found == {states.info.request: reason for reason, states in bad.items()}


def test_rows_of_a_wrong_width_are_short_rows() -> None:
    states = request("a")
    assert "short rows" in str(fault(replace(states, aux_hidden=states.aux_hidden[:-1]), TARGET))
    assert "short rows" in str(fault(replace(states, last_hidden=states.last_hidden[:, 1:]), TARGET))
    assert fault(states, TARGET) is None


def test_ids_outside_the_vocabulary_are_refused() -> None:
    states = request("a")
    assert "vocabulary" in str(fault(replace(states, input_ids=states.input_ids + VOCAB), TARGET))


def test_no_usable_sample_at_all_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="zero mask"):
        make(tmp_path, shard(tmp_path / "in", request("a", generated=1)))


@pytest.mark.parametrize("split", [Split.GATE, Split.SELECTION])
def test_a_held_out_conversation_in_a_training_shard_stops_everything(tmp_path: Path, split: Split) -> None:
    leaked = request("leak", info=request_info("leak", Split.TRAIN).model_copy(update={"conversation": "0"}))
    leaked = replace(leaked, info=leaked.info.model_copy(update={"conversation": conversation("leak", split)}))
    path = shard(tmp_path / "in", request("a"), leaked)
    with pytest.raises(BadInputError, match=f"request leak is of a {split} conversation"):
        make(tmp_path, path)
    assert not (tmp_path / "samples").exists()


def test_a_held_out_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="held_out"):
        make(tmp_path, shard(tmp_path / "in", request("a"), split=Split.GATE))


def test_a_shard_of_another_target_is_refused_by_part(tmp_path: Path) -> None:
    path = shard(tmp_path / "in", request("a"))
    other = TARGET.model_copy(update={"tokenizer": "c" * 64})
    with pytest.raises(ContractMismatch, match="tokenizer"):
        materialise([path], tmp_path / "samples", target=other, cut=CUT)


def test_a_request_that_stands_in_two_shards_is_trained_on_once(tmp_path: Path) -> None:
    made = make(
        tmp_path,
        shard(tmp_path / "in", request("a"), request("b")),
        shard(tmp_path / "in", request("b"), request("c")),
    )
    assert made.count == 3
    assert [(r.request, r.reason.split(":")[0]) for r in made.refused] == [("b", "duplicate")]


def test_a_truncated_shard_is_named_for_each_of_its_requests_and_the_others_train(tmp_path: Path) -> None:
    broken = shard(tmp_path / "in", request("a"), request("b"))
    whole = shard(tmp_path / "in", request("c"), closed_at=3.0)
    broken.write_bytes(broken.read_bytes()[:-100])
    made = make(tmp_path, broken, whole)
    assert made.count == 1
    assert {r.request for r in made.refused} == {"a", "b"}
    assert all("truncated" in r.reason for r in made.refused)


def test_only_the_newest_requests_are_taken_when_there_are_more_than_steps(tmp_path: Path) -> None:
    old = shard(tmp_path / "in", request("old-1"), request("old-2"), closed_at=2.0)
    new = shard(tmp_path / "in", request("new-1", prompt=9), closed_at=5.0)
    made = make(tmp_path, new, old, newest=2)
    assert [len(sample["input_ids"]) for sample in files(made)] == [8, 8]
    assert made.count == 2
    assert int(made.seen[5:13].sum()) == int(made.seen.sum()) - 3
