"""Our forward pass against SpecForge's, and walks over states that the real target model made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.anchors import leading, right_proposals
from tests.support.states import AUX_LAYERS, PROMPTS, contract_of, make_shard, make_states, target_model
from tests.support.tiny import DRAFT_VOCAB, HIDDEN, VOCAB, embedding_of, tiny_bundle, tiny_draft
from tide.domain import Split
from tide.evaluator.draft_module import Eagle3Draft
from tide.evaluator.drafting import Anchors, Beams
from tide.evaluator.eagle3 import Eagle3Evaluator
from tide.models.draft_files import load_draft, write_draft
from tide.models.target_files import head_keys, load_tensor
from tide.trainer.bundle import write_bundle
from tide.trainer.initial import draft_config, initial_tensors
from tide.trainer.vocabulary import Vocabulary

STEPS = 3
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
]


@pytest.fixture(scope="module")
def specforge() -> Iterator[Any]:
    """SpecForge's draft classes, uncompiled: importing them compiles nothing and warns of flash attention."""
    with torch._dynamo.config.patch(disable=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from specforge.modeling import auto

        yield auto


def specforge_logits(
    specforge: Any, folder: Path, embedding: torch.Tensor, aux: torch.Tensor, ids: torch.Tensor
) -> Any:
    """[STEPS, n, DV]: logits of SpecForge's own model at every row, fed its own argmax as its evaluation does."""
    config = specforge.AutoDraftModelConfig.from_file(str(folder / "config.json"))
    model = specforge.AutoDraftModel.from_config(config, torch_dtype=torch.float32).eval()
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in load_draft(folder).tensors.items()}
    model.load_state_dict(tensors | {"embed_tokens.weight": embedding.float()}, strict=True)
    rows = len(ids)
    hidden, cache, found = model.project_hidden_states(aux[None].float()), [[], []], []
    mask = model.prepare_decoder_attention_mask(torch.ones(1, rows), hidden, 1, rows, 0)
    for _ in range(STEPS):
        hidden = model.backbone(
            input_embeds=model.embed_input_ids(ids[None]),
            hidden_states=hidden,
            cache_hidden=cache,
            attention_mask=mask,
            position_ids=torch.arange(rows)[None],
        )
        found.append(model.compute_logits(hidden)[0])
        best = found[-1].argmax(-1)
        ids = best + model.d2t[best]
    return torch.stack(found)


def our_logits(folder: Path, embedding: torch.Tensor, aux: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    draft = Eagle3Draft(load_draft(folder), embedding)
    beams, found = Beams(draft, [Anchors(draft.prefix(aux, ids), torch.arange(len(ids)))]), []
    for depth in range(STEPS):
        if depth:
            beams.advance(draft.target_ids[beams.best()][:, None])
        found.append(beams.logits()[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("rope", ROPES, ids=["default", "linear", "llama3"])
def test_the_forward_pass_equals_that_of_specforge(specforge: Any, tmp_path: Path, rope: dict[str, Any]) -> None:
    folder, embedding = tiny_draft(tmp_path / "drafts", **rope), embedding_of(tiny_bundle(tmp_path / "bundle"))
    generator = torch.Generator().manual_seed(3)
    aux, ids = torch.randn((40, 3 * HIDDEN), generator=generator), torch.randint(0, VOCAB, (40,), generator=generator)
    with torch.inference_mode():
        theirs = specforge_logits(specforge, folder, embedding, aux, ids)
        ours = our_logits(folder, embedding, aux, ids)
    assert ours.shape == (STEPS, 40, DRAFT_VOCAB)
    assert float(theirs.abs().max()) > 1.0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(target model, its bundle, an untrained draft for it that sometimes is right)."""
    model, folder = target_model(), tmp_path_factory.mktemp("real")
    bundle = write_bundle(model, folder / "bundle", contract_of(model))
    config = draft_config(model, AUX_LAYERS, 8192)
    known = Vocabulary.of_low_ids(config["draft_vocab_size"], config["vocab_size"])
    draft, _ = write_draft(folder / "drafts", config, initial_tensors(model, config, known, seed=0))
    return model, bundle, draft


def test_right_proposals_on_real_states_are_those_of_specforge(specforge: Any, real: tuple[Path, Path, Path]) -> None:
    model, bundle, folder = real
    embedding, files = load_tensor(bundle, head_keys(bundle)[0]), load_draft(folder)
    total = 0
    with torch.inference_mode():
        for states in make_states(model, PROMPTS, 48, split=Split.GATE)[:4]:
            ids = torch.cat([states.input_ids, torch.tensor([states.last_token])]).long()
            logits = specforge_logits(specforge, folder, embedding, states.aux_hidden[:-1], ids[1:-1])
            first = states.prompt_len - 1
            expected = [
                leading(files.target_ids[logits[:, i].argmax(-1)].tolist(), ids[i + 2 :].tolist())
                for i in range(first, len(ids) - 2)
            ]
            found = right_proposals(Eagle3Draft(files, embedding), states, STEPS)
            assert found == expected
            total += sum(expected)
    assert total > 0, "the draft is never right: the comparison shows nothing"


def test_a_real_shard_is_walked_whole(real: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, bundle, draft = real
    shard, manifest = make_shard(tmp_path, model, PROMPTS, 48, split=Split.GATE)
    states = make_states(model, PROMPTS, 48, split=Split.GATE)
    report = Eagle3Evaluator().evaluate(draft, [shard], bundle=bundle, split=Split.GATE, steps=STEPS)
    generated = {s.info.request: s.first_row + s.rows + 1 - s.prompt_len for s in states}
    assert {s.request: s.tokens for s in report.scores} == generated
    assert report.target == manifest.target
    assert 1.0 < report.acceptance_length < 2.0
