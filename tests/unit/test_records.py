"""Records that were ever stored are read for ever: fixtures of every schema version, as a real store holds them.

A change that breaks one of these breaks every repository in the field: raise the schema version, keep reading the old
one, and add its fixtures in a folder of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import tide.domain
from tide.domain import LineageRecord
from tide.domain.identity import Value

FIXTURES = Path(__file__).parents[1] / "fixtures" / "records"
STORED = {
    name: kind
    for name in tide.domain.__all__
    if isinstance(kind := getattr(tide.domain, name), type)
    and issubclass(kind, BaseModel)
    and "schema_version" in kind.model_fields
}
FILES = sorted(FIXTURES.glob("*/*.json"))


def kind_of(file: Path) -> type[Value]:
    kind = STORED[file.stem.partition("-")[0]]
    assert issubclass(kind, Value)
    return kind


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_stored_record_is_read_back_to_the_byte(file: Path) -> None:
    stored = file.read_text().strip()
    assert kind_of(file).model_validate_json(stored).to_json() == stored


@pytest.mark.parametrize("name", sorted(STORED))
def test_every_version_of_every_stored_record_has_a_fixture(name: str) -> None:
    current = STORED[name].model_fields["schema_version"].default
    versions = {file.parent.name for file in FILES if kind_of(file) is STORED[name]}
    assert versions == {f"v{version}" for version in range(1, current + 1)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_record_of_a_later_version_is_refused_not_half_read(file: Path) -> None:
    later = json.loads(file.read_text()) | {"schema_version": 99}
    with pytest.raises(ValidationError, match="schema_version"):
        kind_of(file).model_validate_json(json.dumps(later))


def test_a_lineage_record_survives_commit_metadata() -> None:
    for file in FIXTURES.glob("*/LineageRecord-*.json"):
        record = LineageRecord.model_validate_json(file.read_text())
        assert LineageRecord.from_metadata(record.to_metadata()) == record
