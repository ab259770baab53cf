"""Throughput with and without speculation on a real SGLang: writes ``data/profile.json`` and ``data/speed.json``.

One engine without speculation and one for each number of draft steps, all of the same target, take turns: a repeat of
their profile (`tide profile`), then drafts serve the same prompts as plain decoding, at one concurrency: all of them
with the last number of steps, the first one with the others too; and so on for all conditions and repeats. Drafts are
swapped in the running engines. Prompts come from a file of JSON lines with ``workload``, ``messages`` and, where the
corpus has the request, its ``request``; without a file from the packaged workloads. ``--tokens`` should be the limit of
the corpus's answers, so that its walk is of the same answers. Run alone on a quiet machine; about 40 minutes with the
defaults and two drafts:

    python -m tests.bench.decisions.speed --draft chat=DIR --draft code=DIR [--prompts FILE] [--steps 1,3]
        [--concurrency 1:3,4:8] [--tokens 48] [--repeats 4] [--dtype bfloat16] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infra import models
from tests.bench.decisions.corpus import DATA
from tests.bench.decisions.speed_loop import Conditions, arms_of, read_prompts
from tests.support.sglang_server import SglangServer
from tide.engine.sglang import SglangEngine
from tide.models.draft_files import load_draft
from tide.throughput.profiling import measure
from tide.throughput.step_times import Plan

KEY = "bench"
START_S = 1800.0
"""A minute on an idle machine; nothing is measured while one waits."""


@contextmanager
def engines(model: Path, drafts: dict[str, Path], args: argparse.Namespace) -> Iterator[tuple[SglangEngine, Any]]:
    """The plain engine and the speculative ones by their steps, started together, with all drafts to swap in."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        home = Path(scratch)
        digests = {name: load_draft(folder).digest for name, folder in drafts.items()}
        for name, folder in drafts.items():
            shutil.copytree(folder, home / "drafts" / digests[name], dirs_exist_ok=True)
        common: dict[str, Any] = {"admin_key": KEY, "dtype": args.dtype, "threads": args.threads, "start_s": START_S}
        first = home / "drafts" / next(iter(digests.values()))
        servers = [SglangServer(home / "plain", model, **common)]
        for steps in args.steps:
            speculation = {"steps": steps, "draft_tokens": steps + 1, "draft_dir": home / "drafts"}
            servers.append(SglangServer(home / f"steps-{steps}", model, draft=first, **speculation, **common))
        began = time.perf_counter()
        for server in servers:
            stack.enter_context(server)
            print(f"{server.home.name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
        clients = [SglangEngine(s.url, name=s.home.name, admin_key=KEY, control_timeout_s=120) for s in servers]
        for client in clients:
            stack.callback(client.close)
        yield clients[0], dict(zip(args.steps, clients[1:], strict=True))


def collect(model: Path, drafts: dict[str, Path], args: argparse.Namespace) -> None:
    """Measure and write: after each repeat of the profile one repeat of a condition, so that both see one machine."""
    prompts = read_prompts(args.prompts)
    digests = {name: load_draft(folder).digest for name, folder in drafts.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, {args.dtype}"
    with engines(model, drafts, args) as (plain, speculative):
        conditions = Conditions(arms_of(plain, speculative, digests), prompts, args)
        rounds = conditions.rounds()
        plan = Plan(repeats=len(conditions), concurrency=args.profile_concurrency)
        profile = measure(
            plain, list(speculative.values()), plan, machine=machine, report=say, between=lambda: say(next(rounds))
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "profile.json").write_text(profile.to_json() + "\n")
    (args.out / "speed.json").write_text(json.dumps(conditions.rows(), indent=1) + "\n")
    print(f"{len(conditions.rows())} conditions in {args.out / 'speed.json'}")


def say(line: str) -> None:
    """Progress, at once."""
    print(line, flush=True)


def main() -> None:
    """Read the arguments and collect."""
    args = parse()
    # Ending by SIGTERM must end the servers as well.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    home = Path(os.environ.get("TIDE_HOME", ".tide"))
    model = args.model or Path(os.environ.get("TIDE_TARGET_MODEL") or models.ensure_target_model(home))
    drafts = {name: Path(folder) for name, _, folder in (text.partition("=") for text in args.draft)}
    began = time.perf_counter()
    collect(model, drafts, args)
    print(f"{time.perf_counter() - began:.0f} s in all, load average {os.getloadavg()[0]:.1f}")


def parse() -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def counts(text: str) -> dict[int, int]:
        return {int(a): int(b) for a, _, b in (part.partition(":") for part in text.split(","))}

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--steps", type=numbers, default=(1, 3))
    parser.add_argument("--concurrency", type=counts, default={1: 3, 4: 8}, help="requests of a pass, by concurrency")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--profile-concurrency", type=numbers, default=(1, 2, 4))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=DATA)
    return parser.parse_args()


if __name__ == "__main__":
    main()
