"""How ids are given to `tide erase`, and that they become the very hashes that capture writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tide import cli, wiring
from tide.cli import data
from tide.config import Settings
from tide.errors import BadInputError, ConfigError, TideError
from tide.sglang_plugin.admission import Admitter, RequestFacts

KEY = "k" * 40


def subjects(spool: Path, *named: data.Named, key: str = KEY, hashed: bool = False) -> data.Subjects:
    return data._subjects(list(named), Settings(spool=spool, hash_key=key), hashed=hashed)


@pytest.mark.parametrize(
    ("facts", "given"),
    [
        (RequestFacts("r-1", [1, 2], {"tide": {"conversation": "c-17"}}), data.Named(conversation="c-17")),
        (RequestFacts("r-1", [1, 2], session="s-9"), data.Named(conversation="s-9")),
        (RequestFacts("r-1", [1, 2]), data.Named(request="r-1")),
    ],
)
def test_an_id_as_the_client_knows_it_names_what_capture_wrote(
    facts: RequestFacts, given: data.Named, tmp_path: Path
) -> None:
    admission = Admitter(KEY.encode(), sample_rate=1.0, min_tokens=2, max_tokens=100).decide(facts)
    assert subjects(tmp_path, given).name(admission.request, admission.conversation)
    assert not subjects(tmp_path, given, key="x" * 40).name(admission.request, admission.conversation)
    other = Admitter(KEY.encode(), sample_rate=1.0, min_tokens=2, max_tokens=100).decide(RequestFacts("r-2", [3, 4]))
    assert not subjects(tmp_path, given).name(other.request, other.conversation)


def test_the_key_is_the_one_kept_with_the_spool_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TIDE_HASH_KEY"):
        subjects(tmp_path, data.Named(request="r-1"), key="")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "hash.key").write_text(f"{KEY}\n")
    assert subjects(tmp_path, data.Named(request="r-1"), key="") == subjects(tmp_path, data.Named(request="r-1"))


def test_hashes_are_taken_as_they_are_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    found = subjects(tmp_path, data.Named(conversation="0123abcd"), key="", hashed=True)
    assert (found.conversations, found.requests) == (("0123abcd",), ())
    with pytest.raises(BadInputError, match="no hash"):
        subjects(tmp_path, data.Named(conversation="c-17"), hashed=True)


def test_a_file_of_ids_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"conversation": "c-17"}\n\n{"request": "r 1"}\n')
    assert data._read(file) == [data.Named(conversation="c-17"), data.Named(request="r 1")]


@pytest.mark.parametrize(
    "line", ["c-17", "{}", '{"conversation": ""}', '{"conversation": "a", "request": "b"}', '{"session": "a"}', "[1]"]
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(f'{{"request": "r-1"}}\n{line}\n')
    with pytest.raises(BadInputError, match=r"ids\.jsonl, line 2"):
        data._read(file)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ids.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInputError, match="cannot be read"):
        data._read(file)


def test_without_an_id_nothing_is_erased(tmp_path: Path) -> None:
    try:
        result = CliRunner().invoke(cli.app, ["erase", "--home", str(tmp_path)])
        assert isinstance(result.exception, TideError)
        assert "name it by --conversation" in str(result.exception)
    finally:
        wiring.settings.cache_clear()
