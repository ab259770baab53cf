"""The shard format: what is written is what is read, and every broken rule is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from tests.support.tiny import HIDDEN, TARGET, VOCAB, request_info
from tide.domain import Shard, Split
from tide.errors import ContractMismatch, ShardError
from tide.states.shard_checks import semantic_agreement, validate_shard
from tide.states.shards import RequestStates, ShardReader, read_manifest, write_shard


def states(name: str, prompt: int, generated: int, *, first_row: int = 0, seed: int = 0) -> RequestStates:
    generator = torch.Generator().manual_seed(seed)
    rows = prompt + generated - 1 - first_row
    return RequestStates(
        info=request_info(name, Split.TRAIN),
        input_ids=torch.randint(0, VOCAB, (rows,), generator=generator, dtype=torch.int32),
        last_token=1,
        first_row=first_row,
        prompt_len=prompt,
        aux_hidden=torch.randn(rows, 3 * HIDDEN, generator=generator).to(torch.bfloat16),
        last_hidden=torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16),
    )


def consistent(name: str, head: torch.Tensor, prompt: int = 4, generated: int = 24, wrong: int = 0) -> RequestStates:
    """States whose greedy tokens follow from the head, but for the first ``wrong`` generated ones."""
    made = states(name, prompt, generated)
    following = (made.last_hidden.float() @ head.T).argmax(-1).to(torch.int32)
    following[prompt - 1 : prompt - 1 + wrong] = (following[prompt - 1 : prompt - 1 + wrong] + 1) % VOCAB
    return replace(made, input_ids=torch.cat([made.input_ids[:1], following[:-1]]), last_token=int(following[-1]))


def write(folder: Path, *requests: RequestStates, split: Split = Split.TRAIN) -> Path:
    shard = write_shard(folder, requests, split=split, target=TARGET, opened_at=1.0, closed_at=2.0)
    return folder / shard.file


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=6))
def test_what_is_written_is_what_is_read(tmp_path: Path, shapes: list[tuple[int, int, int]]) -> None:
    wanted = [
        states(f"r{i}", prompt, generated + 1, first_row=min(first, prompt - 1), seed=i)
        for i, (prompt, generated, first) in enumerate(shapes)
    ]
    path = write(tmp_path, *wanted)
    with ShardReader(path) as reader:
        found = list(reader)
    assert len(found) == len(wanted)
    for ours, theirs in zip(wanted, found, strict=True):
        assert theirs.info == ours.info
        assert (theirs.last_token, theirs.first_row, theirs.prompt_len) == (
            ours.last_token,
            ours.first_row,
            ours.prompt_len,
        )
        for key in ("input_ids", "aux_hidden", "last_hidden"):
            assert torch.equal(getattr(theirs, key), getattr(ours, key))
    assert validate_shard(path).rows == sum(s.rows for s in wanted)


def test_generated_rows_start_one_before_the_first_generated_token() -> None:
    made = states("r", 5, 3, first_row=2)
    assert made.generated_rows().tolist() == [False, False, True, True, True]
    assert made.next_ids().tolist() == [*made.input_ids[1:].tolist(), 1]


def test_an_empty_shard_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one request"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_manifest_does_not_exist(tmp_path: Path) -> None:
    path = write(tmp_path, states("r", 3, 3))
    path.with_suffix(".json").unlink()
    with pytest.raises(ShardError, match="no_manifest"):
        validate_shard(path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _garble_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "rule"),
    [(_truncate, "truncated"), (_flip, "wrong_digest"), (_garble_manifest, "bad_manifest")],
)
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], rule: str) -> None:
    path = write(tmp_path, states("r", 3, 3))
    damage(path)
    with pytest.raises(ShardError) as error:
        validate_shard(path)
    assert error.value.rule == rule
    assert path.name in str(error.value)


def _rewrite(path: Path, **tensors: torch.Tensor) -> Path:
    """The shard with other tensors under a manifest that vouches for the new bytes."""
    import hashlib

    data = save({**load_file(path), **tensors})
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest |= {"name": hashlib.sha256(data).hexdigest(), "size": len(data)}
    shard = Shard.model_validate(manifest)
    fresh = path.with_name(shard.file)
    fresh.write_bytes(data)
    fresh.with_suffix(".json").write_text(shard.to_json())
    return fresh


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        ({"aux_hidden": torch.zeros(5, 3 * HIDDEN - 1, dtype=torch.bfloat16)}, "wrong_width"),
        ({"last_hidden": torch.zeros(4, HIDDEN, dtype=torch.bfloat16)}, "wrong_length"),
        ({"last_hidden": torch.zeros(5, HIDDEN, dtype=torch.float32)}, "wrong_dtype"),
        ({"aux_hidden": torch.full((5, 3 * HIDDEN), float("nan"), dtype=torch.bfloat16)}, "non_finite"),
        ({"last_hidden": torch.full((5, HIDDEN), float("inf"), dtype=torch.bfloat16)}, "non_finite"),
        ({"offsets": torch.tensor([0, 6])}, "bad_offsets"),
        ({"offsets": torch.tensor([1, 5])}, "bad_offsets"),
        ({"input_ids": torch.full((5,), VOCAB, dtype=torch.int32)}, "id_out_of_range"),
        ({"input_ids": torch.full((5,), -1, dtype=torch.int32)}, "id_out_of_range"),
        ({"prompt_lens": torch.tensor([6], dtype=torch.int32)}, "missing_rows"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], rule: str) -> None:
    path = _rewrite(write(tmp_path, states("r", 3, 3)), **tensors)
    with pytest.raises(ShardError) as error:
        validate_shard(path)
    assert error.value.rule == rule


def test_offsets_that_go_backwards_name_the_request(tmp_path: Path) -> None:
    path = write(tmp_path, states("a", 3, 3), states("b", 3, 3), states("c", 3, 3))
    path = _rewrite(path, offsets=torch.tensor([0, 8, 5, 15]))
    with pytest.raises(ShardError, match="not increasing") as error:
        validate_shard(path)
    assert error.value.row == 1


def test_a_shard_of_another_target_is_refused_by_its_part(tmp_path: Path) -> None:
    path = write(tmp_path, states("r", 3, 3))
    other = TARGET.model_copy(update={"tokenizer": "c" * 64})
    with pytest.raises(ContractMismatch, match="tokenizer"):
        validate_shard(path, expected_target=other)
    assert validate_shard(path, expected_target=TARGET).target == TARGET


def test_greedy_tokens_must_follow_from_the_states_of_each_request(tmp_path: Path) -> None:
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    good = consistent("good", head)
    assert semantic_agreement(good, head) == (1.0, 24)
    validate_shard(write(tmp_path / "good", good), head=head)
    # 2 of 24 wrong is 0.917, above the bar; 3 wrong is 0.875, below it.
    validate_shard(write(tmp_path / "edge", consistent("edge", head, wrong=2)), head=head)
    path = write(tmp_path / "bad", good, consistent("bad", head, wrong=3))
    with pytest.raises(ShardError, match="bad") as error:
        validate_shard(path, head=head)
    assert (error.value.rule, error.value.row) == ("wrong_states", 1)


def test_rows_shifted_by_one_are_found_although_every_value_is_finite(tmp_path: Path) -> None:
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    good = consistent("r", head)
    shifted = replace(good, last_hidden=good.last_hidden.roll(1, dims=0))
    with pytest.raises(ShardError, match="wrong_states"):
        validate_shard(write(tmp_path, shifted), head=head)


def test_a_sampled_request_need_not_be_the_likeliest(tmp_path: Path) -> None:
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    made = consistent("r", head, wrong=20)
    sampled = replace(made, info=made.info.model_copy(update={"sampling": "sampled"}))
    validate_shard(write(tmp_path, sampled), head=head)


def test_equal_tensors_of_different_requests_are_different_shards(tmp_path: Path) -> None:
    first, second = write(tmp_path, states("a", 3, 3)), write(tmp_path, states("b", 3, 3))
    assert first != second
    assert [read_manifest(p).requests[0].request for p in (first, second)] == ["a", "b"]


def test_writing_the_same_requests_twice_gives_one_file(tmp_path: Path) -> None:
    first, second = (write(tmp_path, states("r", 3, 3)) for _ in range(2))
    assert first == second
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert read_manifest(first).requests[0].request == "r"
