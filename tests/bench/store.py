"""What the store takes: ``python -m tests.bench.store`` writes ``results/store.json``.

Eight files of 64 MiB are put on a branch one after the other, committed, merged and streamed back, through the store
port to a real lakeFS server on this machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.lakefs.server import LakefsServer
from tide.store.lakefs import LakefsStore

FILES, SIZE = 8, 64 << 20
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".tide") as folder, LakefsServer(Path(folder) / "home") as server:
        keys = server.credentials
        result = measure(LakefsStore(server.endpoint, keys.access_key, keys.secret_key), Path(folder))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "store.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measure(store: LakefsStore, folder: Path) -> dict[str, float]:
    """Seconds and MB/s of each step."""
    store.create_repository("bench")
    store.create_branch("bench", "side", "main")
    sources = [folder / str(i) for i in range(FILES)]
    for source in sources:
        source.write_bytes(os.urandom(SIZE))
    total = FILES * SIZE / 1e6
    upload = _timed(lambda: [store.put("bench", "side", f"s/{s.name}", s) for s in sources])
    commit = _timed(lambda: store.commit("bench", "side", "bench", {}))
    merge = _timed(lambda: store.merge("bench", "side", "main", "bench", {}))
    download = _timed(lambda: [store.download("bench", "main", f"s/{s.name}", folder / "back") for s in sources])
    stream = _timed(lambda: [_drain(store, f"s/{s.name}") for s in sources])
    return {
        "upload_mb_per_s": total / upload,
        "commit_s": commit,
        "merge_s": merge,
        "download_mb_per_s": total / download,
        "stream_mb_per_s": total / stream,
        "load_average": os.getloadavg()[0],
    }


def _drain(store: LakefsStore, path: str) -> None:
    with store.open("bench", "main", path) as stream:
        while stream.read(1 << 20):
            pass


def _timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
