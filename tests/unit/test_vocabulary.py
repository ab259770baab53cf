"""The draft vocabulary: choosing it, keeping it, and never training on a map that is not the draft's own (drill T1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.tiny import CONFIG, DRAFT_VOCAB, HIDDEN, TARGET, VOCAB, tiny_draft
from tide.domain import TrainingConfig
from tide.errors import ContractMismatch, DraftError
from tide.models.draft_files import load_draft, write_draft
from tide.models.target_files import INDEX_FILE
from tide.trainer.samples import Samples
from tide.trainer.start import check_parent, check_start, choose_start, write_start
from tide.trainer.vocabulary import Vocabulary, check_mapping, choose_vocabulary, coverage, reindex, write_mapping


def counts(**by_id: int) -> torch.Tensor:
    found = torch.zeros(VOCAB, dtype=torch.int64)
    for name, count in by_id.items():
        found[int(name.removeprefix("t"))] = count
    return found


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "model.embed_tokens.weight": torch.randn((VOCAB, HIDDEN), generator=generator),
        "lm_head.weight": torch.randn((VOCAB, HIDDEN), generator=generator),
        "model.norm.weight": torch.rand(HIDDEN, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 8}))
    (folder / "contract.json").write_text(TARGET.to_json())
    return folder


def samples(seen: torch.Tensor, generated: torch.Tensor) -> Samples:
    return Samples(Path("unused"), seen, generated, count=1, tokens=1)


def test_generated_tokens_weigh_more_than_prompt_tokens() -> None:
    chosen = choose_vocabulary(counts(t5=3, t9=2), counts(t9=1), 1)
    assert chosen.ids.tolist() == [9]


def test_room_that_the_data_does_not_fill_goes_to_low_ids() -> None:
    assert choose_vocabulary(counts(t50=1), counts(t50=1), 4).ids.tolist() == [0, 1, 2, 50]


def test_more_room_than_tokens_gives_the_whole_vocabulary() -> None:
    chosen = choose_vocabulary(counts(t1=1), counts(), 1000)
    assert chosen.t2d.all()
    assert torch.equal(chosen.d2t, torch.zeros(VOCAB, dtype=torch.int64))


@given(st.lists(st.integers(0, 50), min_size=VOCAB, max_size=VOCAB), st.integers(1, VOCAB))
def test_a_chosen_vocabulary_is_consistent_and_covers_more_than_any_other_of_its_size(
    found: list[int], size: int
) -> None:
    generated = torch.tensor(found)
    chosen = choose_vocabulary(torch.zeros_like(generated), generated, size)
    Vocabulary.of_draft({"d2t": chosen.d2t, "t2d": chosen.t2d}, VOCAB)
    best = int(generated.sort(descending=True).values[:size].sum())
    assert int(generated[chosen.ids].sum()) == best


def test_coverage_is_the_share_of_generated_tokens() -> None:
    known = Vocabulary.of(torch.tensor([1, 2]), VOCAB)
    assert coverage(known, counts(t1=3, t7=1)) == pytest.approx(0.75)
    assert coverage(known, counts()) == 1.0


def test_a_re_chosen_vocabulary_keeps_known_rows_bit_for_bit_and_scales_new_ones(tmp_path: Path) -> None:
    parent = load_draft(tiny_draft(tmp_path)).tensors
    head = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(1))
    old = Vocabulary.of_draft(parent, VOCAB)
    chosen = Vocabulary.of(torch.cat([old.ids[4:], torch.tensor([49, 51, 53, 55])]).sort().values, VOCAB)
    moved = reindex(parent, chosen, head)
    kept = torch.isin(chosen.ids, old.ids)
    assert int(kept.sum()) == DRAFT_VOCAB - 4
    assert torch.equal(moved["lm_head.weight"][kept], parent["lm_head.weight"][4:])
    ratio = parent["lm_head.weight"].norm() / head[old.ids].norm()
    torch.testing.assert_close(moved["lm_head.weight"][~kept], head[chosen.ids[~kept]] * ratio)
    assert torch.equal(moved["fc.weight"], parent["fc.weight"])
    write_draft(tmp_path / "moved", CONFIG, moved)


def test_a_map_and_a_mask_that_disagree_are_refused(tmp_path: Path) -> None:
    tensors = dict(load_draft(tiny_draft(tmp_path)).tensors)
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][5:9] += 1
    with pytest.raises(DraftError, match="disagree"):
        Vocabulary.of_draft(tensors, VOCAB)


def test_a_partly_shifted_map_is_refused_before_step_0(tmp_path: Path, bundle: Path) -> None:
    parent = load_draft(tiny_draft(tmp_path))
    start = choose_start(parent, samples(counts(t0=1), counts(t0=1)), TrainingConfig(), bundle)
    mapping = tmp_path / "map.pt"
    write_start(start, tmp_path / "start", mapping)
    known = start.vocabulary
    shifted = Vocabulary.of(torch.where(torch.arange(DRAFT_VOCAB) < 6, known.ids, known.ids + 1), VOCAB)
    write_mapping(mapping, shifted)
    with pytest.raises(ContractMismatch, match="18 of 24 tokens"):
        check_start(tmp_path / "start", mapping)


def test_the_map_of_a_draft_of_another_size_is_refused(tmp_path: Path) -> None:
    write_mapping(tmp_path / "map.pt", Vocabulary.of_low_ids(7, VOCAB))
    with pytest.raises(ContractMismatch, match="draft_vocab_size"):
        check_mapping(tmp_path / "map.pt", load_draft(tiny_draft(tmp_path)).tensors, VOCAB)


def test_a_parent_whose_map_was_changed_consistently_is_refused_when_loaded(tmp_path: Path) -> None:
    folder = tiny_draft(tmp_path)
    files = load_draft(folder)
    other = Vocabulary.of_low_ids(DRAFT_VOCAB, VOCAB)
    metadata = {"format": "pt", "tide.contract": files.contract.digest()}
    save_file({**files.tensors, "d2t": other.d2t, "t2d": other.t2d}, folder / "model.safetensors", metadata=metadata)
    with pytest.raises(ContractMismatch):
        load_draft(folder)


def test_a_parent_that_covers_the_traffic_is_trained_as_it_is(tmp_path: Path, bundle: Path) -> None:
    parent = load_draft(tiny_draft(tmp_path))
    start = choose_start(parent, samples(counts(t0=9, t63=1), counts(t0=96, t63=4)), TrainingConfig(), bundle)
    assert not start.rechosen
    assert start.coverage == pytest.approx(0.96)
    assert all(torch.equal(start.tensors[name], tensor) for name, tensor in parent.tensors.items())


def test_a_parent_that_does_not_cover_the_traffic_gets_a_new_vocabulary_of_the_same_size(
    tmp_path: Path, bundle: Path
) -> None:
    parent = load_draft(tiny_draft(tmp_path))
    start = choose_start(parent, samples(counts(t0=9, t63=9), counts(t0=9, t63=9)), TrainingConfig(), bundle)
    assert start.rechosen
    assert start.coverage == 1.0
    assert start.tensors["lm_head.weight"].shape == parent.tensors["lm_head.weight"].shape
    assert write_draft(tmp_path / "new", start.config, start.tensors)[1] != parent.digest


def test_a_first_draft_starts_from_the_targets_own_head_and_is_the_same_every_time(
    tmp_path: Path, bundle: Path
) -> None:
    config = TrainingConfig(draft_vocab_size=10, seed=4)
    data = samples(counts(t40=5), counts(t40=5))
    first, again = (choose_start(None, data, config, bundle) for _ in range(2))
    assert first.vocabulary.ids.tolist() == [*range(9), 40]
    one, two = (write_draft(tmp_path / n, s.config, s.tensors)[1] for n, s in (("a", first), ("b", again)))
    assert one == two
    other = choose_start(None, data, config.model_copy(update={"seed": 5}), bundle)
    assert write_draft(tmp_path / "c", other.config, other.tensors)[1] != one


def test_a_parent_of_another_target_is_refused_by_part(tmp_path: Path) -> None:
    parent = load_draft(tiny_draft(tmp_path))
    check_parent(parent, TARGET)
    with pytest.raises(ContractMismatch, match="aux_layers"):
        check_parent(parent, TARGET.model_copy(update={"aux_layers": (1, 2, 4)}))
