"""What the store takes: ``python -m tests.bench.store`` writes ``results/store.json``.

1 GiB in shards of 64 MiB is put on a branch and committed through the store port to a real lakeFS server on this
machine, in turns with a plain copy with fsync to the same disk; the client's memory is watched. Then `tide lineage` and
`tide history --at` on 1,000 windows and 100 drafts, as functions and as whole commands. The fault drill's figures are
taken over from its own result (`make drill-store`). Run alone on a quiet machine:

    python -m tests.bench.store [--pairs 5] [--shards 16] [--windows 1000] [--drafts 100] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from infra import ports
from infra.lakefs.server import LakefsServer
from tests.support.long_history import write_drafts, write_windows
from tide.files import sync_folder
from tide.lineage import history, history_text, provenance
from tide.store.lakefs import LakefsStore

SIZE = 64 << 20
RESULTS = Path(__file__).parent / "results"
STATES, DRAFTS = "bench-states", "bench-drafts"
REPEATS = 5


def connect(server: LakefsServer) -> LakefsStore:
    """A client that has asked nothing yet."""
    keys = server.credentials
    return LakefsStore(server.endpoint, keys.access_key, keys.secret_key)


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@contextmanager
def peak_memory(peak: list[int]) -> Iterator[None]:
    """Appends the most resident bytes of this process while the block runs, looked at every 10 ms."""
    process, ended, most = psutil.Process(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.01):
            most[0] = max(most[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        peak.append(most[0])


def copied(sources: list[Path], folder: Path) -> None:
    """What there is to beat: each file copied and on the disk before the next."""
    folder.mkdir()
    for source in sources:
        with source.open("rb") as data, (folder / source.name).open("wb") as file:
            shutil.copyfileobj(data, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)


def uploaded(store: LakefsStore, branch: str, sources: list[Path]) -> None:
    """The same through the adapter: put and committed."""
    store.create_branch("bench", branch, "main")
    for source in sources:
        store.put("bench", branch, f"{branch}/{source.name}", source)
    store.commit("bench", branch, branch, {})


def measure_upload(server: LakefsServer, folder: Path, shards: int, pairs: int) -> dict[str, Any]:
    """Interleaved pairs; before each measurement the disk has nothing left to write."""
    sources = [folder / f"{i}.safetensors" for i in range(shards)]
    for source in sources:
        source.write_bytes(os.urandom(SIZE))
    store, peak, found = connect(server), list[int](), list[dict[str, float]]()
    store.create_repository("bench")
    store.put("bench", "main", "warm-up", b"")
    baseline = psutil.Process().memory_info().rss
    for turn in range(pairs):
        os.sync()
        copy = seconds(lambda: copied(sources, folder / "copy"))
        shutil.rmtree(folder / "copy")
        os.sync()
        with peak_memory(peak):
            upload = seconds(lambda turn=turn: uploaded(store, f"turn-{turn}", sources))
        synced = seconds(os.sync)
        found.append({"copy_s": copy, "upload_s": upload, "then_sync_s": synced})
        print(f"pair {turn + 1}/{pairs}: copy {copy:.2f} s, upload {upload:.2f} s, sync {synced:.2f} s", flush=True)
    return {
        "upload_ratio": statistics.median(p["copy_s"] / p["upload_s"] for p in found),
        "upload_ratio_synced": statistics.median(p["copy_s"] / (p["upload_s"] + p["then_sync_s"]) for p in found),
        "upload_mb_per_s": shards * SIZE / 1e6 / statistics.median(p["upload_s"] for p in found),
        "rss_over_baseline_mb": (max(peak) - baseline) / 1e6,
        "pairs": found,
    }


def measure_views(server: LakefsServer, home: Path, windows: int, drafts: int) -> dict[str, Any]:
    """Medians of the two views: the whole command (start of Python included), and the function alone."""
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - began:.0f} s: {line}", flush=True)

    store = connect(server)
    commits = write_windows(store, STATES, windows, say)
    write_drafts(store, DRAFTS, STATES, commits, drafts, say)
    changes = provenance.changes(store, DRAFTS)
    assert len(changes) == drafts
    at = changes[drafts // 2].at
    moment = history_text.moment(at).removesuffix(" UTC").replace(" ", "T")
    functions: dict[str, Callable[[], Any]] = {
        "lineage": lambda: history_text.tree(provenance.trace(connect(server), DRAFTS, "serving")),
        "history": lambda: history.serving_at(provenance.changes(connect(server), DRAFTS), at),
    }
    commands = {"lineage": ["lineage", "serving"], "history": ["history", "--at", moment]}
    result: dict[str, Any] = {"windows": windows, "drafts": drafts, "start_s": median_s(["--help"], server, home)}
    for name, function in functions.items():
        result[f"{name}_function_s"] = statistics.median(seconds(function) for _ in range(REPEATS))
        result[f"{name}_s"] = median_s(commands[name], server, home)
    return result


def median_s(arguments: list[str], server: LakefsServer, home: Path) -> float:
    """Seconds of one `tide` command, as a person waits for it; the first, which fills caches, is left out."""
    keys = server.credentials
    env = os.environ | {
        "TIDE_SERVICE": "bench",
        "TIDE_HOME": str(home),
        "TIDE_LAKEFS_ENDPOINT": server.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": keys.access_key,
        "TIDE_LAKEFS_SECRET_KEY": keys.secret_key,
    }
    command = [sys.executable, "-m", "tide.cli", *arguments]
    taken = [seconds(lambda: subprocess.run(command, env=env, check=True, capture_output=True)) for _ in range(6)]
    return statistics.median(taken[1:])


def drill_figures() -> dict[str, Any] | None:
    """What `make drill-store` found last; None when it was never run."""
    path = RESULTS / "store_drill.json"
    return dict(json.loads(path.read_text())["drill"]) if path.exists() else None


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--drafts", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "store.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    # Ending by SIGTERM must end the server as well.
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        with LakefsServer(folder / "home", port=ports.free_port(), die_with_parent=True) as server:
            result = measure_upload(server, folder, args.shards, args.pairs)
            result |= measure_views(server, folder / "home", args.windows, args.drafts)
    result |= {
        "drill": drill_figures(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load_before": round(load, 1)},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "pairs"}, indent=1))


if __name__ == "__main__":
    main()
