"""What capture costs: CPU time of hooks and writer over the scheduler's, and throughput with and without it.

Two servers of the same model and draft, one that captures everything and one without the plugin, take turns with the
same prompts at concurrency 4; an idle server sleeps. Writes tests/bench/results/capture.json. Run alone on a quiet
machine:

    python tests/bench/capture.py [--pairs 8] [--tokens 48] [--prompts 8] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from scipy import stats

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from infra import models  # noqa: E402
from tests.support.sglang_server import SglangServer  # noqa: E402

RESULT = REPOSITORY / "tests" / "bench" / "results" / "capture.json"
CONCURRENCY = 4
TOPICS = ("the sea", "a compiler", "old bridges", "bread", "the moon", "chess", "wool", "a town", "rain", "glass")


def prompts(count: int, turn: int) -> list[str]:
    """Other prompts each turn, the same for both servers: none of them finds a cached prefix."""
    return [f"{turn}-{i}: tell me a long story about {TOPICS[i % len(TOPICS)]}." for i in range(count)]


def throughput(server: SglangServer, texts: list[str], tokens: int) -> float:
    """Output tokens a second at concurrency 4."""

    def one(text: str) -> int:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = server.post("/generate", {"text": text, "sampling_params": params})
        return int(answer["meta_info"]["completion_tokens"])

    began = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        produced = sum(pool.map(one, texts))
    return produced / (time.perf_counter() - began)


def capture_state(server: SglangServer) -> dict[str, Any]:
    """The plugin's counters."""
    info = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
    state: dict[str, Any] = info["internal_states"][0]["tide"]["capture"]
    return state


def ratio_interval(ratios: list[float]) -> dict[str, float | int]:
    """Mean of paired ratios with its 95% t interval."""
    mean = statistics.fmean(ratios)
    half = float(stats.t.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "pairs": len(ratios)}


def measure(on: SglangServer, off: SglangServer, args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved pairs; which server goes first alternates."""
    for server in (on, off):
        throughput(server, prompts(CONCURRENCY, -1), 16)  # first requests are slow
    time.sleep(2.0)
    before, pairs = capture_state(on)["cpu_s"], []
    for turn in range(args.pairs):
        texts, speed = prompts(args.prompts, turn), {}
        for name, server in (("on", on), ("off", off)) if turn % 2 else (("off", off), ("on", on)):
            speed[name] = throughput(server, texts, args.tokens)
        pairs.append(speed)
        print(f"pair {turn + 1}/{args.pairs}: on {speed['on']:.1f} off {speed['off']:.1f} tok/s", flush=True)
    time.sleep(2.0)
    state = capture_state(on)
    spent = {name: state["cpu_s"][name] - before[name] for name in before}
    return {
        "cpu_ratio": (spent["hooks"] + spent["writer"]) / spent["scheduler"],
        "cpu_s": spent,
        "throughput_ratio": ratio_interval([p["on"] / p["off"] for p in pairs]),
        "pairs": pairs,
        "rows": state["rows"],
        "dropped": state["dropped"],
        "concurrency": CONCURRENCY,
        "dtype": args.dtype,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load_before": args.load},
    }


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=8)
    # A CPU without bfloat16 instructions computes it at a third of the speed.
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    args.load = os.getloadavg()[0]
    # Ending by SIGTERM must end the servers as well.
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    model = models.ensure_target_model(Path(os.environ.get("TIDE_HOME", REPOSITORY / ".tide")))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        draft = models.untrained_draft(model, home / "draft")
        with (
            SglangServer(home / "on", model, draft=draft, dtype=args.dtype, spool=home / "spool") as on,
            SglangServer(home / "off", model, draft=draft, dtype=args.dtype) as off,
        ):
            result = measure(on, off, args)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: result[k] for k in ("cpu_ratio", "throughput_ratio", "rows", "dropped")}, indent=2))


if __name__ == "__main__":
    main()
