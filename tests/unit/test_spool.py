"""The spool: windows, what is listed, quarantine and removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.spooled import START, WINDOW_S, add_segment, add_shard
from tide.errors import ConfigError, SpoolBusy
from tide.states import spool


@pytest.mark.parametrize(
    ("closed_at", "window_s", "window"),
    [
        (0.0, 300, "19700101T000000Z"),
        (299.999, 300, "19700101T000000Z"),
        (300.0, 300, "19700101T000500Z"),
        (1_796_012_400.0, 600, "20261130T042000Z"),
        (1_796_012_999.9, 600, "20261130T042000Z"),
        (1_796_013_000.0, 1, "20261130T043000Z"),
    ],
)
def test_a_moment_falls_into_the_window_that_starts_at_or_before_it(
    closed_at: float, window_s: int, window: str
) -> None:
    assert spool.window_of(closed_at, window_s) == window


def test_window_names_sort_as_their_times_do() -> None:
    names = [spool.window_of(START + i * WINDOW_S, WINDOW_S) for i in range(300)]
    assert names == sorted(set(names))


def test_only_windows_that_have_ended_are_listed_oldest_first(tmp_path: Path) -> None:
    late = add_shard(tmp_path, 2, at=START + WINDOW_S + 1)
    early = add_shard(tmp_path, 1, at=START + 1)
    piece = add_segment(tmp_path, 1, at=START + 2)
    now = START + 2 * WINDOW_S
    found = spool.closed_windows(tmp_path, now, WINDOW_S)
    assert list(found) == [spool.window_of(START, WINDOW_S), spool.window_of(START + WINDOW_S, WINDOW_S)]
    first, second = found.values()
    assert [s.manifest for s in first.shards] == [early]
    assert [s.manifest for s in first.segments] == [piece]
    assert [s.manifest for s in second.shards] == [late]
    assert list(spool.closed_windows(tmp_path, now - 0.001, WINDOW_S)) == [spool.window_of(START, WINDOW_S)]


def test_a_file_without_a_manifest_is_not_listed(tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    (tmp_path / "train" / f"{shard.name}.json").unlink()
    (tmp_path / "train" / f".{shard.name}.json.tmp").write_text(shard.to_json())
    assert spool.closed_windows(tmp_path, START + 1000, WINDOW_S) == {}


def test_a_missing_spool_is_a_configuration_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TIDE_SPOOL"):
        spool.closed_windows(tmp_path / "nowhere", START, WINDOW_S)
    with pytest.raises(ConfigError, match="TIDE_SPOOL"), spool.locked(tmp_path / "nowhere"):
        pytest.fail("locked a spool that is not there")


def test_damaged_files_are_named_with_their_rule(tmp_path: Path) -> None:
    now = START + 10_000
    good, orphan, young, malformed = (add_shard(tmp_path, seed) for seed in range(4))
    train = tmp_path / "train"
    for shard in (orphan, young):
        (train / f"{shard.name}.json").unlink()
    os.utime(train / orphan.file, (now - spool.ORPHAN_S - 1,) * 2)
    os.utime(train / young.file, (now - 10,) * 2)
    (train / f"{malformed.name}.json").write_text('{"schema_version": 9}')
    found = spool.damaged(tmp_path, now)
    assert found == {train / malformed.file: "bad_manifest", train / orphan.file: "no_manifest"}
    assert train / good.file not in found


def test_quarantine_moves_file_and_manifest_and_says_why(tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    path = tmp_path / "train" / shard.file
    spool.quarantine(tmp_path, path, window="w", rule="non_finite", detail="row 3")
    assert not path.exists()
    refused = tmp_path / "quarantine"
    assert sorted(p.name for p in refused.iterdir()) == [
        f"{shard.name}.json",
        f"{shard.name}.reason.json",
        shard.file,
    ]
    note = spool.QuarantineNote.model_validate_json((refused / f"{shard.name}.reason.json").read_bytes())
    assert (note.folder, note.window, note.rule, note.detail) == ("train", "w", "non_finite", "row 3")
    assert spool.quarantined(tmp_path, "w") == {shard.file: "non_finite"}
    assert spool.quarantined(tmp_path, "another") == {}


def test_a_quarantine_that_was_cut_off_is_completed_under_its_first_reason(tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    path = tmp_path / "train" / shard.file
    spool.quarantine(tmp_path, path, window="w", rule="non_finite", detail="row 3")
    (tmp_path / "quarantine" / f"{shard.name}.json").rename(path.with_suffix(".json"))
    spool.quarantine(tmp_path, path, window="w", rule="missing_file", detail="no file")
    assert spool.quarantined(tmp_path, "w") == {shard.file: "non_finite"}
    assert list((tmp_path / "train").iterdir()) == []


def test_a_file_that_was_put_back_no_longer_counts_as_refused(tmp_path: Path) -> None:
    shard = add_shard(tmp_path, 1)
    path = tmp_path / "train" / shard.file
    spool.quarantine(tmp_path, path, window="w", rule="wrong_target", detail="weights")
    for name in (shard.file, f"{shard.name}.json"):
        (tmp_path / "quarantine" / name).rename(tmp_path / "train" / name)
    assert spool.quarantined(tmp_path, "w") == {}


def test_one_harvester_at_a_time_and_the_other_is_told_who(tmp_path: Path) -> None:
    with (
        spool.locked(tmp_path),
        pytest.raises(SpoolBusy, match=f"process {os.getpid()}"),
        spool.locked(tmp_path),
    ):
        pytest.fail("two hold the spool")
    with spool.locked(tmp_path):
        pass
