"""Throughput with and without speculation on a real SGLang: writes ``data/profile.json`` and ``data/speed.json``.

One engine without speculation and one for each number of draft steps, all of the same target, take turns: first their
profile is measured (tide.profiling), then drafts serve the same prompts as plain decoding, at each concurrency: all of
them with the last number of steps, the first one with the others too. Drafts are swapped in the running engines.
Prompts come from a file of JSON lines with ``workload``, ``messages`` and, where the corpus has the request, its
``request``; without a file from the packaged workloads. ``--tokens`` should be the limit of the corpus's answers, so
that its walk is of the same answers. Run alone on a quiet machine; about 14 minutes with the defaults and two drafts:

    python -m tests.bench.decisions.speed --draft chat=DIR --draft code=DIR [--prompts FILE] [--steps 1,3]
        [--concurrency 1:3,4:12] [--tokens 48] [--repeats 2] [--profile-repeats 5] [--dtype bfloat16] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infra import models
from tests.bench.decisions.corpus import DATA
from tests.support.sglang_server import SglangServer
from tide.demo.traffic import load_workload
from tide.draft_files import load_draft
from tide.engine.base import Generation
from tide.engine.sglang import SglangEngine
from tide.load import concurrency_histogram
from tide.profiling import measure
from tide.step_times import Plan

KEY = "bench"
WORKLOADS = ("chat", "functions", "code")
START_S = 1800.0
"""A minute on an idle machine; nothing is measured while one waits."""


@dataclass(frozen=True)
class Prompt:
    """One request to be."""

    workload: str
    request: str
    """Its id in the corpus; empty when it is not of the corpus."""
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Arm:
    """One way of decoding: plain (no draft, 0 steps), or a draft with its steps."""

    engine: SglangEngine
    draft: str = "none"
    digest: str = ""
    steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.draft}/{self.steps}" if self.steps else "plain"

    def prepare(self) -> None:
        """The draft is in serving and no prompt is cached; not timed."""
        if self.digest:
            self.engine.swap_draft(self.digest)
        self.engine.flush_cache()


@dataclass
class Pass:
    """Answers of one arm to some prompts, in the order of the prompts, and when each began and ended."""

    answers: list[Generation]
    started: list[float]
    finished: list[float]
    wall_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.wall_s = max(self.finished) - min(self.started)

    @property
    def tokens(self) -> int:
        return sum(a.completion_tokens for a in self.answers)

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.wall_s


def read_prompts(path: Path | None) -> dict[str, list[Prompt]]:
    """Prompts by workload, in the order of the file."""
    if path is None:
        return {name: [Prompt(name, "", p.messages) for p in load_workload(name)] for name in WORKLOADS}
    found: dict[str, list[Prompt]] = {}
    for line in filter(str.strip, path.read_text().splitlines()):
        row = json.loads(line)
        prompt = Prompt(row["workload"], str(row.get("request") or ""), tuple(row["messages"]))
        found.setdefault(prompt.workload, []).append(prompt)
    return found


def serve(arm: Arm, prompts: Sequence[Prompt], concurrency: int, tokens: int) -> Pass:
    """All prompts in a closed loop.

    Answers of plain decoding would all end together, and their next prompts be prefilled together, as no service's are:
    the first request of each place in the loop is cut short, at another length each. (In an engine simulated with known
    costs that takes a bias of 5% off the speedup at concurrency 4.)
    """

    def one(at: int) -> tuple[Generation, float, float]:
        limit = tokens if at >= concurrency else max(tokens * (at + 1) // concurrency, 2)
        began = time.perf_counter()
        answer = arm.engine.generate(prompts[at].messages, max_new_tokens=limit)
        return answer, began, time.perf_counter()

    with ThreadPoolExecutor(concurrency) as pool:
        done = list(pool.map(one, range(len(prompts))))
    answers, started, finished = (list(column) for column in zip(*done, strict=True))
    return Pass(answers, started, finished)


def conditions(arms: Sequence[Arm], prompts: dict[str, list[Prompt]], args: argparse.Namespace) -> Iterator[Any]:
    """Every workload at every concurrency, all arms in turn within a repeat."""
    for workload, own in prompts.items():
        at = 0
        for concurrency, count in args.concurrency.items():
            passes: dict[str, list[Pass]] = {arm.name: [] for arm in arms}
            used: list[str] = []
            for repeat in range(args.repeats):
                chosen = [own[(at + i) % len(own)] for i in range(count)]
                at, used = at + count, used + [p.request for p in chosen if p.request]
                shift = repeat % len(arms)
                for arm in (*arms[shift:], *arms[:shift]):
                    arm.prepare()
                    done = serve(arm, chosen, concurrency, args.tokens)
                    passes[arm.name].append(done)
                    where = f"{workload}, concurrency {concurrency}, repeat {repeat + 1}/{args.repeats}"
                    print(f"{where}, {arm.name}: {done.tokens} tokens, {done.rate:.1f} tok/s", flush=True)
            for arm in arms:
                if arm.steps:
                    yield condition(arm, workload, concurrency, passes["plain"], passes[arm.name]) | {"requests": used}


def condition(arm: Arm, workload: str, concurrency: int, plain: list[Pass], ours: list[Pass]) -> dict[str, Any]:
    """One row of speed.json. Rates are medians of the repeats; the speedup is the median of their ratios."""
    answers = [a for done in ours for a in done.answers]
    counted = [a for a in answers if a.verify_steps]
    started, finished = ([t for done in ours for t in getattr(done, name)] for name in ("started", "finished"))
    return {
        "draft": arm.draft,
        "steps": arm.steps,
        "workload": workload,
        "concurrency": concurrency,
        "plain_tok_s": statistics.median(p.rate for p in plain),
        "spec_tok_s": statistics.median(o.rate for o in ours),
        "speedup": statistics.median(o.rate / p.rate for o, p in zip(ours, plain, strict=True)),
        "speedup_repeats": [o.rate / p.rate for o, p in zip(ours, plain, strict=True)],
        "acceptance_length": sum(a.completion_tokens for a in counted) / sum(a.verify_steps or 0 for a in counted),
        "prompt_tokens": float(np.mean([a.prompt_tokens - a.cached_tokens for a in answers])),
        "output_tokens": float(np.mean([a.completion_tokens for a in answers])),
        "histogram": concurrency_histogram(started, finished, [a.completion_tokens for a in answers]),
        "answers": len(answers),
    }


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
    """Measure and write; what is there is written as it comes."""
    prompts = read_prompts(args.prompts)
    digests = {name: load_draft(folder).digest for name, folder in drafts.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, {args.dtype}"
    with engines(model, drafts, args) as (plain, speculative):
        plan = Plan(repeats=args.profile_repeats, concurrency=args.profile_concurrency)
        ours = list(speculative.values())
        profile = measure(plain, ours, plan, machine=machine, report=lambda line: print(line, flush=True))
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "profile.json").write_text(profile.to_json() + "\n")
        rows: list[dict[str, Any]] = []
        for row in conditions(arms_of(plain, speculative, digests), prompts, args):
            rows.append(row)
            (args.out / "speed.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} conditions in {args.out / 'speed.json'}")


def arms_of(plain: SglangEngine, speculative: dict[int, SglangEngine], digests: dict[str, str]) -> list[Arm]:
    """Plain decoding, every draft with the last number of steps, and the first draft with the others."""
    *others, main = speculative
    first = next(iter(digests))
    served = [(main, name) for name in digests] + [(steps, first) for steps in others]
    return [Arm(plain), *(Arm(speculative[steps], name, digests[name], steps) for steps, name in served)]


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
    parser.add_argument("--concurrency", type=counts, default={1: 3, 4: 12}, help="requests of a pass, by concurrency")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile-repeats", type=int, default=5)
    parser.add_argument("--profile-concurrency", type=numbers, default=(1, 2, 4))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=DATA)
    return parser.parse_args()


if __name__ == "__main__":
    main()
