"""Files and folders are whole or absent, whatever happens while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tide.files import whole_folder, write_durably


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "serving"
    write_durably(path, b"old")
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    write_durably(tmp_path / "keys", b"secret", mode=0o600)
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "serving"
    path.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(OSError, match="serving"):
        write_durably(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_with_everything_in_it_and_replaces_the_old_one(tmp_path: Path) -> None:
    destination = tmp_path / "models" / "draft"
    for content in ("first", "second"):
        with whole_folder(destination) as folder:
            (folder / content).write_text(content)
            assert not (destination / content).exists()
    assert [item.name for item in destination.iterdir()] == ["second"]
    assert list(destination.parent.iterdir()) == [destination]


def test_a_folder_whose_filling_fails_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    destination = tmp_path / "draft"
    with whole_folder(destination) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(FileNotFoundError), whole_folder(destination) as folder:
        (folder / "weights").write_bytes((tmp_path / "missing").read_bytes())
    assert (destination / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [destination]


def test_what_a_killed_process_of_the_same_id_left_behind_is_not_taken_over(tmp_path: Path) -> None:
    destination = tmp_path / "draft"
    with whole_folder(destination) as folder:
        left = folder
    left.mkdir()
    (left / "torn").write_text("")
    with whole_folder(destination) as folder:
        (folder / "weights").write_text("new")
    assert [item.name for item in destination.iterdir()] == ["weights"]
