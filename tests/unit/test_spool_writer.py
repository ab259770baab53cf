"""The writer thread and the spool: complete files or none, everything else counted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tide.domain import Shard, Split, TargetContract, split_of
from tide.sglang_plugin import spool as spool_module
from tide.sglang_plugin.admission import Admission
from tide.sglang_plugin.counters import CaptureCounters
from tide.sglang_plugin.inbox import Inbox
from tide.sglang_plugin.records import DropAll, FinishedRequest, Part, StepRows
from tide.sglang_plugin.spool import Spool
from tide.sglang_plugin.store import RowStore
from tide.sglang_plugin.writer import SpoolWriter
from tide.states.requests import read_segment, read_table
from tide.states.shard_checks import validate_shard
from tide.states.shards import ShardReader

HIDDEN = 4
TARGET = TargetContract(
    weights="a" * 64, tokenizer="b" * 64, dtype="float32", hidden_size=HIDDEN, vocab_size=1000, aux_layers=(1, 2, 3)
)


class Rig:
    """A writer on a spool in a temporary folder."""

    def __init__(self, root: Path, *, queue_bytes: int = 1 << 20, store_bytes: int = 1 << 20, **spool: Any) -> None:
        self.root, self.counters, self.inbox = root, CaptureCounters(), Inbox(queue_bytes)
        self.failures: list[Exception] = []
        options = {"shard_bytes": 1 << 20, "shard_age_s": 3600.0, "quota_bytes": 1 << 30, **spool}
        self.writer = SpoolWriter(
            inbox=self.inbox,
            store=RowStore(store_bytes),
            counters=self.counters,
            open_spool=lambda: Spool(root, target=TARGET, engine="test", counters=self.counters, **options),
            bounds=(2, 500),
            idle_evict_s=3600.0,
            on_failure=self.failures.append,
        )

    def rows(self, serial: int, positions: range, *, nan: bool = False) -> StepRows:
        """A step with rows of one request, between two rows of others that were rejected."""
        count = len(positions)
        aux, last = torch.zeros(count + 2, 3 * HIDDEN), torch.zeros(count + 2, HIDDEN)
        aux[1:-1] += torch.tensor(list(positions)).reshape(-1, 1) + 100 * serial
        last[1:-1] += torch.tensor(list(positions)).reshape(-1, 1) + 100 * serial
        if nan:
            last[1, 0] = float("nan")
        return StepRows(aux, last, (Part(serial, positions.start, 1, count),))

    def offer(self, item: StepRows | FinishedRequest) -> bool:
        return self.inbox.offer(item, item.size)

    def request(
        self, serial: int, *, prompt: int = 6, total: int = 10, capture: range | None = None, **kw: Any
    ) -> None:
        """Rows and the end of one request."""
        self.offer(self.rows(serial, range(0, total - 1) if capture is None else capture, nan=kw.pop("nan", False)))
        self.offer(finished(serial, prompt=prompt, total=total, **kw))

    def run(self) -> None:
        self.writer.start()
        assert self.writer.close(20.0)
        assert self.failures == []

    def complete(self) -> list[Path]:
        """Shards with their manifest: a file without one does not exist yet."""
        return sorted(p for p in self.root.glob("*/*.safetensors") if p.with_suffix(".json").exists())

    def shards(self) -> list[Shard]:
        return [validate_shard(p, expected_target=TARGET) for p in self.complete()]

    def table(self) -> list[dict[str, Any]]:
        return read_table(self.root.glob("requests/*.parquet")).to_pylist()  # type: ignore[no-any-return]

    def dropped(self) -> dict[str, int]:
        return dict(self.counters.snapshot()["dropped"])


def conversation(split: Split) -> str:
    return next(c for c in (f"{i:08x}" for i in range(1000)) if split_of(c) is split)


def finished(serial: int, *, prompt: int, total: int, split: Split = Split.TRAIN, **changes: Any) -> FinishedRequest:
    out = changes.pop("opted_out", False)
    reason = changes.pop("reason", "no_logs" if out else None)
    identity = (None, None, None) if out else (conversation(split), None, split)
    return FinishedRequest(
        **{
            "serial": serial,
            "admission": Admission(f"{serial:032x}", reason, out, *identity),
            "ids": [(serial + p) % 1000 for p in range(total)],
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "started_at": 1.0,
            "finished_at": 2.0,
            "verify_steps": 2,
            "proposed": 6,
            "accepted": 2,
            "temperature": 0.0,
            "sampling": "greedy",
            "draft": "none",
            "finish_reason": "length",
            "decode": lambda ids: "x" * len(ids),
            **changes,
        }
    )


def test_rows_ids_and_table_of_a_request_arrive_together(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.request(1)
    rig.run()
    (path,) = tmp_path.glob("train/*.safetensors")
    validate_shard(path, expected_target=TARGET)
    with ShardReader(path) as reader:
        (states,) = list(reader)
    assert states.input_ids.tolist() == list(range(1, 10))
    assert (states.last_token, states.first_row, states.prompt_len) == (10, 0, 6)
    assert states.last_hidden[:, 0].tolist() == [100.0 + p for p in range(9)]
    (row,) = rig.table()
    assert (row["captured_rows"], row["prompt_tokens"], row["response_tokens"]) == (9, 6, 4)
    assert (row["slice"], row["split"], row["script"]) == ("latin-le256", "train", "latin")
    assert sum(row["token_sketch"]) == 4
    assert len(row["pooled"]) == 64
    assert rig.dropped() == {}


def test_held_out_conversations_never_share_a_folder_with_training_ones(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for serial, split in enumerate((Split.TRAIN, Split.GATE, Split.SELECTION, Split.TRAIN), 1):
        rig.request(serial, split=split)
    rig.run()
    folders = {shard.split: len(shard.requests) for shard in rig.shards()}
    assert folders == {"train": 2, "held_out": 2}


def test_an_opted_out_request_leaves_counters_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.offer(finished(1, prompt=6, total=10, opted_out=True))
    rig.run()
    (row,) = rig.table()
    assert rig.shards() == []
    assert row["opted_out"]
    assert row["response_tokens"] == 4
    assert [row[c] for c in ("conversation", "slice", "split", "script", "token_sketch", "pooled")] == [None] * 6


def test_a_request_without_rows_still_has_its_line_in_the_table(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.offer(finished(1, prompt=6, total=6, finish_reason="abort", verify_steps=None, proposed=None, accepted=None))
    rig.offer(finished(2, prompt=6, total=9, reason="sampled_out"))
    rig.run()
    assert [(r["finish_reason"], r["captured_rows"], r["verify_steps"]) for r in rig.table()] == [
        ("abort", 0, None),
        ("length", 0, 2),
    ]


def test_a_gap_keeps_the_longest_run_and_counts_what_it_lost(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.offer(rig.rows(1, range(0, 4)))
    rig.request(1, capture=range(5, 19), prompt=6, total=20)
    rig.run()
    (shard,) = rig.shards()
    assert shard.rows == 14
    assert rig.counters.snapshot()["missing_prompt_rows"] == 5


def test_a_run_that_ends_inside_the_prompt_is_dropped(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.request(1, capture=range(0, 4), prompt=6, total=10)
    rig.run()
    assert rig.shards() == []
    assert rig.dropped() == {"gap": 4}


def test_a_tensor_that_is_not_finite_costs_its_own_request_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.request(1)
    rig.request(2, nan=True)
    rig.request(3)
    rig.run()
    (shard,) = rig.shards()
    assert [r.request for r in shard.requests] == [f"{s:032x}" for s in (1, 3)]
    assert rig.dropped() == {"non_finite": 9}


def test_no_file_name_comes_from_a_client(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    rig = Rig(tmp_path / "spool")
    rig.request(1, finish_reason="../trav")
    rig.run()
    assert [p.name for p in tmp_path.iterdir()] == ["spool"]
    assert all(len(p.stem) == 64 for p in (tmp_path / "spool").rglob("*.*"))


def test_a_shard_is_closed_by_its_size(tmp_path: Path) -> None:
    rig = Rig(tmp_path, shard_bytes=500)
    for serial in range(1, 8):
        rig.request(serial)
    rig.run()
    assert len(rig.shards()) == 4


def test_a_shard_and_the_table_are_closed_by_their_age(tmp_path: Path) -> None:
    rig = Rig(tmp_path, shard_age_s=0.2)
    rig.request(1)
    rig.writer.start()
    wait_for(lambda: len(list(tmp_path.glob("*/*.json"))) == 2)
    assert rig.writer.close(20.0)


def test_a_full_spool_drops_rows_counts_them_and_recovers_when_room_is_made(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    blocker = tmp_path / "train" / "not-yet-harvested"
    blocker.write_bytes(b"x" * 5000)
    rig = Rig(tmp_path, shard_bytes=100, quota_bytes=5000)
    rig.request(1)
    rig.writer.start()
    wait_for(lambda: rig.dropped() == {"quota": 9})
    blocker.unlink()
    rig.request(2)
    wait_for(lambda: len(rig.shards()) == 1)
    assert rig.writer.close(20.0)
    assert [len(s.requests) for s in rig.shards()] == [1]
    (manifest,) = tmp_path.glob("requests/*.json")
    assert read_segment(manifest).dropped == {"quota": 9}


def test_a_full_disk_drops_rows_and_keeps_the_counters_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_shard, real_segment = spool_module.write_shard, spool_module.write_segment

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module, "write_shard", full)
    monkeypatch.setattr(spool_module, "write_segment", full)
    rig = Rig(tmp_path, shard_bytes=100, shard_age_s=0.1)
    rig.request(1)
    rig.request(2)
    rig.writer.start()
    wait_for(lambda: rig.dropped() == {"disk_full": 18})
    time.sleep(1.2)
    assert list(tmp_path.rglob("*.json")) == []
    monkeypatch.setattr(spool_module, "write_shard", real_shard)
    monkeypatch.setattr(spool_module, "write_segment", real_segment)
    assert rig.writer.close(20.0)
    assert len(rig.table()) == 2
    (manifest,) = tmp_path.glob("requests/*.json")
    assert read_segment(manifest).dropped == {"disk_full": 18}
    warnings = [r.getMessage() for r in caplog.records if "shard could not be written" in r.getMessage()]
    assert len(warnings) == 1


def test_the_queue_is_bounded_in_bytes_and_never_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_bytes=4000)
    step = rig.rows(1, range(0, 8))
    accepted = 0
    while rig.inbox.offer(step, step.size):
        accepted += 1
    assert accepted == 4000 // step.size
    assert rig.inbox.size <= 4000
    small = finished(1, prompt=2, total=4)
    assert not rig.inbox.offer(small, 300)
    assert rig.inbox.offer(small, 300, urgent=True)


def test_what_the_writer_holds_counts_against_the_queue(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_bytes=4000)
    rig.inbox.held = 3990
    assert not rig.offer(rig.rows(1, range(0, 8)))


def test_a_full_store_costs_the_request_that_did_not_fit(tmp_path: Path) -> None:
    rig = Rig(tmp_path, store_bytes=64 * 16 * HIDDEN)
    rig.offer(rig.rows(1, range(0, 9)))
    rig.offer(rig.rows(2, range(0, 9)))
    rig.offer(rig.rows(2, range(9, 12)))
    rig.offer(finished(1, prompt=6, total=10))
    rig.offer(finished(2, prompt=6, total=13))
    rig.run()
    (shard,) = rig.shards()
    assert [r.request for r in shard.requests] == [f"{1:032x}"]
    assert rig.dropped() == {"store_full": 12}


def test_rows_of_two_target_models_never_meet(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.offer(rig.rows(1, range(0, 4)))
    rig.inbox.offer(DropAll("target_update"), 0)
    rig.offer(rig.rows(1, range(4, 9)))
    rig.offer(finished(1, prompt=2, total=10))
    rig.run()
    (shard,) = rig.shards()
    assert shard.rows == 5
    assert rig.dropped() == {"target_update": 4}


def test_unfinished_requests_are_counted_when_the_engine_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.offer(rig.rows(1, range(0, 4)))
    rig.run()
    assert rig.dropped() == {"shutdown": 4}


def test_a_writer_that_cannot_start_says_so_once_and_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    writer = SpoolWriter(
        inbox=rig.inbox,
        store=RowStore(1000),
        counters=rig.counters,
        open_spool=lambda: (_ for _ in ()).throw(OSError("no such target")),
        bounds=(2, 500),
        idle_evict_s=1.0,
        on_failure=rig.failures.append,
    )
    writer.start()
    assert writer.close(10.0)
    assert [str(e) for e in rig.failures] == ["no such target"]


def test_half_written_files_of_a_killed_process_are_removed_when_old(tmp_path: Path) -> None:
    for folder in ("train", "requests"):
        (tmp_path / folder).mkdir()
    old, young = tmp_path / "train" / ".aaa.safetensors.tmp", tmp_path / "requests" / ".bbb.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    Rig(tmp_path).run()
    assert not old.exists()
    assert young.exists()


_SERVED = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {here!r})
from test_spool_writer import Rig
from tide.sglang_plugin.hooks import Hooks
from tide.sglang_plugin.settings import PluginSettings

rig = Rig(Path({root!r}))
rig.writer.start()
hooks = Hooks(PluginSettings(), None, capture=SimpleNamespace(close=lambda: rig.writer.close(10.0)))

def loop(scheduler):
    rig.request(1)
    Path({root!r}, "ready").touch()
    while True:
        time.sleep(0.05)

hooks.around_loop(loop, None)
"""


def test_sigterm_writes_what_is_open_before_the_process_ends(tmp_path: Path) -> None:
    code = _SERVED.format(here=str(Path(__file__).parent), root=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_for((tmp_path / "ready").exists, 60.0)
        assert list(tmp_path.glob("*/*.json")) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 128 + signal.SIGTERM
    (tmp_path / "ready").unlink()
    shards = [validate_shard(p) for p in tmp_path.glob("train/*.safetensors")]
    assert [s.rows for s in shards] == [9]
    assert len(read_table(tmp_path.glob("requests/*.parquet"))) == 1


def test_counting_from_two_threads_loses_nothing() -> None:
    counters = CaptureCounters()

    def count() -> None:
        for _ in range(5000):
            counters.drop("gap", 1)
            counters.exclude("sampled_out")

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.period() == ({"gap": 10000}, {"sampled_out": 10000})
    counters.close_period({"gap": 9999}, {"sampled_out": 10000})
    assert counters.period() == ({"gap": 1}, {})


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
