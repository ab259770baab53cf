"""Files and folders are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tide.files import held, whole_folder, write_durably


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


def test_writers_of_one_folder_at_once_do_not_share_what_they_write(tmp_path: Path) -> None:
    destination = tmp_path / "draft"
    with whole_folder(destination) as first:
        (first / "first").touch()
        with whole_folder(destination) as second:
            (second / "second").touch()
        assert [item.name for item in destination.iterdir()] == ["second"]
    assert [item.name for item in destination.iterdir()] == ["first"]


def test_a_folder_named_by_its_content_stays_as_it_is_under_a_reader(tmp_path: Path) -> None:
    destination = tmp_path / "draft"
    with whole_folder(destination, replace=False) as slower:
        (slower / "weights").write_text("the same")
        with whole_folder(destination, replace=False) as faster:
            (faster / "weights").write_text("the same")
        reader = (destination / "weights").open()
        published = (destination / "weights").stat().st_ino
    assert (destination / "weights").stat().st_ino == published
    assert reader.read() == "the same"
    reader.close()
    assert list(tmp_path.iterdir()) == [destination]


def test_a_folder_that_cannot_be_published_is_an_error_and_not_taken_for_another_s_work(tmp_path: Path) -> None:
    (tmp_path / "draft").write_text("a file in the way")
    with pytest.raises(NotADirectoryError), whole_folder(tmp_path / "draft", replace=False) as folder:
        (folder / "weights").touch()
    assert [item.name for item in tmp_path.iterdir()] == ["draft"]


def test_a_lock_is_waited_for_and_names_its_holder(tmp_path: Path) -> None:
    lock, order, waiting = tmp_path / "made" / "lock", list[str](), threading.Event()

    def second() -> None:
        def told(holder: str) -> None:
            order.append(f"waits for {holder}")
            waiting.set()

        with held(lock, told):
            order.append("second")

    with held(lock, order.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == [f"waits for {os.getpid()}", "first", "second"]


def test_a_lock_is_free_again_after_its_holder_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), held(tmp_path / "lock", print):
        raise ZeroDivisionError
    told: list[str] = []
    with held(tmp_path / "lock", told.append):
        assert told == []
