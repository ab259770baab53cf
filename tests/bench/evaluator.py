"""How fast held-out requests are walked: chains and trees at temperature 0, and chains above it.

The requests and drafts are those that `tide demo` leaves: SmolLM2-135M, drafts of one layer with 8192 of its tokens.
Writes tests/bench/results/evaluator.json. Run alone on a quiet machine:

    python tests/bench/evaluator.py [--home .tide/demo] [--requests 400]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from tide.evaluator.draft_module import Eagle3Draft  # noqa: E402
from tide.evaluator.target import SampledTarget  # noqa: E402
from tide.evaluator.tree import TreeShape  # noqa: E402
from tide.evaluator.walker import Walker  # noqa: E402
from tide.models.draft_files import load_draft  # noqa: E402
from tide.models.target_files import head_keys, load_tensor  # noqa: E402
from tide.states.shards import RequestStates, ShardReader  # noqa: E402

RESULT = REPOSITORY / "tests" / "bench" / "results" / "evaluator.json"
STEPS, TOPK, TREE_TOKENS, TEMPERATURE = 3, 4, 8, 0.7


def held_out(home: Path, most: int) -> list[RequestStates]:
    """The first requests of the held-out shards."""
    found: list[RequestStates] = []
    for path in sorted((home / "cache" / "held_out").glob("*.safetensors")):
        with ShardReader(path) as reader:
            found += list(reader)
    return found[:most]


def timed(walker: Walker, requests: Sequence[RequestStates]) -> dict[str, float]:
    """Wall time with every core, CPU time with one: threads that wait for each other spin."""
    spent = {}
    for threads, clock in ((torch.get_num_threads(), time.perf_counter), (1, time.process_time)):
        torch.set_num_threads(threads)
        began = clock()
        with torch.inference_mode():
            walks = [walk for _, walk in walker.walk(requests)]
        spent[clock.__name__] = clock() - began
    tokens = sum(walk.tokens for walk in walks)
    return {
        "tokens_per_s": tokens / spent["perf_counter"],
        "cpu_s_per_token": spent["process_time"] / tokens,
        "acceptance_length": tokens / sum(walk.verify_steps for walk in walks),
    }


def measure(home: Path, most: int, threads: int) -> dict[str, Any]:
    """Every setting on the same requests and the draft that came last."""
    requests = held_out(home, most)
    folder = max((home / "cache" / "drafts").iterdir(), key=lambda path: path.stat().st_mtime)
    embedding, head = head_keys(home / "bundle")
    draft = Eagle3Draft(load_draft(folder), load_tensor(home / "bundle", embedding))
    vocabulary = draft.contract.draft_vocab_size
    chain, tree = TreeShape.of(STEPS, 1, None, vocabulary), TreeShape.of(STEPS, TOPK, TREE_TOKENS, vocabulary)
    target = SampledTarget(load_tensor(home / "bundle", head), TEMPERATURE)
    walkers = {
        "chain": Walker(draft, chain),
        f"tree of {TREE_TOKENS} tokens, topk {TOPK}": Walker(draft, tree),
        f"chain at temperature {TEMPERATURE:.2f}": Walker(draft, chain, target),
    }
    with torch.inference_mode():
        list(walkers["chain"].walk(requests[:4]))  # the first matrix products are slow
    found = {}
    for name, walker in walkers.items():
        torch.set_num_threads(threads)
        found[name] = timed(walker, requests)
    return {
        **found["chain"],
        "settings": found,
        "requests": len(requests),
        "rows": sum(states.rows for states in requests),
        "steps": STEPS,
        "threads": threads,
    }


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("TIDE_HOME", REPOSITORY / ".tide")) / "demo")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    result = measure(args.home, args.requests, torch.get_num_threads()) | {
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load_before": load},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
