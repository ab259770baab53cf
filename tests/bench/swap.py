"""How long serving stands still for a draft swap: ``python -m tests.bench.swap`` writes ``results/swap.json``.

Four requests are kept running while three drafts take turns: the engine holds two, so that each is read from disk and
checked. The time is from asking for the pause until generation went on, as the client sees it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

from infra import models
from tests.support.drafts import draft_tensors, for_model
from tests.support.sglang_server import SglangServer
from tide.engine.sglang import SglangEngine
from tide.models.draft_files import write_draft

RESULTS = Path(__file__).parent / "results" / "swap.json"
KEY, REQUESTS, ROUNDS = "bench", 4, 9


def main() -> None:
    """Measure, write, print."""
    home = Path(os.environ.get("TIDE_HOME", ".tide"))
    target = Path(os.environ.get("TIDE_TARGET_MODEL") or models.ensure_target_model(home))
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(target.absolute(), Path(scratch))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    print(json.dumps(figures, indent=1, sort_keys=True))


def measure(target: Path, scratch: Path) -> dict[str, object]:
    """Seconds of each swap under load, and idle."""
    config, folder = for_model(target), scratch / "drafts"
    digests = [write_draft(folder, config, draft_tensors(config, seed))[1] for seed in range(3)]
    with SglangServer(
        scratch, target, draft=folder / digests[0], draft_dir=folder, admin_key=KEY, dtype="float32"
    ) as server:
        engine = SglangEngine(server.url, admin_key=KEY, control_timeout_s=120)
        server.generate(["warm up"] * REQUESTS, tokens=8)
        idle = swap_seconds(engine, digests)
        stop = threading.Event()
        load = [threading.Thread(target=keep_busy, args=(server, stop, i)) for i in range(REQUESTS)]
        for thread in load:
            thread.start()
        time.sleep(2.0)
        busy = swap_seconds(engine, digests)
        stop.set()
        for thread in load:
            thread.join()
        engine.close()
    return {
        "swap_s_under_load": statistics.median(busy),
        "swap_s_under_load_all": [round(s, 4) for s in busy],
        "swap_s_idle": statistics.median(idle),
        "requests_in_flight": REQUESTS,
        "draft_bytes": (folder / digests[0] / "model.safetensors").stat().st_size,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 1),
    }


def swap_seconds(engine: SglangEngine, digests: list[str]) -> list[float]:
    """Seconds of ROUNDS swaps; with three drafts in turn each is read from disk, since the engine holds two."""
    return [engine.swap_draft(digests[i % len(digests)]).seconds for i in range(1, ROUNDS + 1)]


def keep_busy(server: SglangServer, stop: threading.Event, index: int) -> None:
    """One request after the other until told to stop."""
    while not stop.is_set():
        server.generate([f"Tell me about the number {index}."], tokens=48)


if __name__ == "__main__":
    main()
