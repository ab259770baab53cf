"""Records: frozen, exact, with an identity that names what differs."""

from __future__ import annotations

import hashlib

import pytest
from pydantic import ValidationError

from tests.support.tiny import TARGET
from tide.domain import EvalReport, LineageRecord, RequestScore, Serving, Split, TargetContract, split_of


def test_a_record_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        Serving.model_validate({"surprise": 1})


def test_a_record_of_a_later_schema_is_refused() -> None:
    with pytest.raises(ValidationError, match="schema_version"):
        Serving.model_validate({"schema_version": 2})


def test_splits_keep_their_shares_and_never_change() -> None:
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(20_000)]
    shares = {split: sum(split_of(h) is split for h in hashes) / len(hashes) for split in Split}
    assert shares[Split.GATE] == pytest.approx(0.10, abs=0.01)
    assert shares[Split.SELECTION] == pytest.approx(0.05, abs=0.01)
    # Fixed for ever: a changed rule would move gate conversations into training.
    assert "".join(split_of(h).value[0] for h in hashes[:40]) == EXPECTED_SPLITS


EXPECTED_SPLITS = "tttttttttststtttgttttttttttttstttttgttts"


def test_held_out_splits_share_a_folder_that_training_does_not_list() -> None:
    assert {Split.GATE.folder, Split.SELECTION.folder} == {"held_out"}
    assert Split.TRAIN.folder == "train"


@pytest.mark.parametrize("part", ["weights", "tokenizer", "dtype", "hidden_size", "vocab_size", "aux_layers"])
def test_a_different_target_is_named_by_its_part(part: str) -> None:
    change = {"weights": "c" * 64, "tokenizer": "c" * 64, "dtype": "float16", "aux_layers": (1, 2, 4)}.get(part, 99)
    other = TARGET.model_copy(update={part: change})
    assert [line.split(":")[0] for line in TARGET.differences(other)] == [part]
    assert TARGET.differences(TargetContract.model_validate_json(TARGET.to_json())) == ()


def test_acceptance_length_is_pooled_not_a_mean_of_ratios() -> None:
    def score(name: str, tokens: int, steps: int) -> RequestScore:
        return RequestScore(
            request=name,
            conversation=name,
            slice="s",
            tokens=tokens,
            verify_steps=steps,
            proposed=3 * steps,
            accepted=0,
        )

    report = EvalReport(
        draft="d",
        contract=None,
        target=TARGET,
        states_commit="c",
        steps=3,
        scores=(score("a", 10, 10), score("b", 90, 30)),
    )
    assert report.acceptance_length == pytest.approx(100 / 40)


def test_lineage_survives_commit_metadata() -> None:
    record = LineageRecord(kind="candidate", subject="s", parents={"draft": "p"}, facts={"seed": "0", "a.b": "c"})
    assert LineageRecord.from_metadata(record.to_metadata()) == record
    assert LineageRecord.from_metadata({"someone": "else"}) is None
