"""A name from outside becomes part of a path only when it cannot lead anywhere else, at every door that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infra import local, start
from tests.fakes.memory_store import MemoryStore
from tests.unit.test_rollout import REPOSITORY, A, store_with
from tide import names
from tide.config import Settings
from tide.domain import LineageRecord, Shard
from tide.errors import BadInputError, ConfigError, DraftError, ServiceError
from tide.serving import rollout
from tide.serving.serving_file import candidate_on, draft_prefix
from tide.sglang_plugin.drafts import DraftShelf
from tide.signatures.attestation import attestation_file
from tide.states import snapshots, spool, window_branch
from tide.states.spool import QuarantineNote

RECORDS = Path(__file__).parents[1] / "fixtures" / "records" / "v1"
HOSTILE = [
    "../../etc",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\x00b",
    "a\n",
    f"{A}\n",
    f"{A}/..",
    f" {A}",
    A.upper(),
]
outside = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=80))


@given(outside)
@example(A)
def test_what_passes_for_a_digest_is_one_component_below_its_folder(text: str) -> None:
    if not names.is_digest(text):
        with pytest.raises(BadInputError, match="never a path"):
            names.require_digest(text, "draft digest")
        return
    assert Path("/drafts", names.require_digest(text, "draft digest")).parts == ("/", "drafts", text)


@given(outside)
@example("r0")
@example("a" * 129)
def test_what_passes_for_a_plain_name_is_one_component_below_its_folder(text: str) -> None:
    if not names.is_plain(text):
        with pytest.raises(BadInputError):
            names.require_plain(text, "name")
        return
    assert Path("/spool", text).resolve().parent == Path("/spool").resolve()
    assert text.isascii()


@given(outside.filter(lambda text: not names.is_digest(text)))
def test_no_path_and_no_object_name_is_made_of_what_is_no_digest(text: str) -> None:
    for make in (draft_prefix, attestation_file):
        with pytest.raises(BadInputError):
            make(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_candidate_whose_lineage_names_a_path_is_installed_nowhere(text: str, tmp_path: Path) -> None:
    """Who may write a branch of the drafts repository may write its commit's metadata."""
    store, inside = store_with(A), tmp_path / "a" / "drafts"
    record = LineageRecord(kind="candidate", subject=text)
    store.create_branch(REPOSITORY, "candidate-evil", "main")
    store.put(REPOSITORY, "candidate-evil", "x", b"x")
    store.commit(REPOSITORY, "candidate-evil", "candidate", record.to_metadata())
    digest = candidate_on(store, REPOSITORY, "candidate-evil")
    with pytest.raises(BadInputError, match="no draft digest"):
        rollout.install_draft(store, REPOSITORY, "candidate-evil", digest, inside)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("text", HOSTILE)
def test_an_engine_is_told_of_drafts_by_digest_alone(text: str, tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="never a path"):
        DraftShelf(tmp_path).find(text)
    (tmp_path / "serving").write_text(text)
    if text.strip() != A:  # a pointer's last newline is its own
        with pytest.raises(DraftError, match="not a draft digest"):
            DraftShelf(tmp_path).serving()


def test_a_symbolic_link_is_no_draft(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / A).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DraftError, match="is not in"):
        DraftShelf(tmp_path).find(A)


def test_a_restart_is_asked_for_by_digest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["local", "restart-engine", "--home", str(tmp_path), "--draft", "../../elsewhere"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(local, "restart_engine", lambda *_args, **_options: pytest.fail("the engine was touched"))
    assert local.main() == 1


def test_a_start_takes_no_pointer_out_of_the_draft_folder(tmp_path: Path) -> None:
    drafts = tmp_path / "drafts"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    drafts.mkdir()
    (drafts / "serving").write_text("../elsewhere\n")
    with pytest.raises(ServiceError, match="names draft"):
        start.marked_draft(drafts)


@given(outside.filter(lambda text: not names.is_plain(text) and not set(text) & set(",=") and text == text.strip()))
def test_a_replica_whose_name_is_a_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TIDE_REPLICAS"):
        _ = Settings(replicas=f"r0=http://h:1,{text}=http://h:2").replica_urls
    with pytest.raises(BadInputError):
        window_branch.prefix("20261130T042000Z", text)


@given(outside)
def test_a_shard_is_named_by_digest_or_does_not_parse(text: str) -> None:
    known = Shard.model_validate_json(next(RECORDS.glob("Shard-*.json")).read_bytes())
    content = {**known.model_dump(mode="json"), "name": text}
    if names.is_digest(text):
        assert Shard.model_validate(content).file == f"{text}.safetensors"
    else:
        with pytest.raises(ValueError, match="name"):
            Shard.model_validate(content)


@pytest.mark.parametrize("text", ["z/../../..", "z/..", "..", "z//", "/z", "z/a b", "z/\n"])
def test_a_request_table_is_downloaded_into_its_folder_wherever_it_stood(text: str, tmp_path: Path) -> None:
    store = MemoryStore()
    store.create_repository("states")
    store.put("states", "main", f"windows/{text}/requests.parquet", b"rows")
    folder = tmp_path / "a" / "b" / "cache"
    found = snapshots.fetch_request_tables(store, "states", "main", folder)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found == written
    assert all(path.parent == folder for path in written)


def test_a_quarantine_note_points_into_the_quarantine_alone(tmp_path: Path) -> None:
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "secret").write_text("x")
    note = QuarantineNote(file="../secret", folder="train", window="w", rule="r", detail="d")
    (tmp_path / "quarantine" / "x.reason.json").write_text(note.to_json())
    assert spool.quarantined(tmp_path, "w") == {}
