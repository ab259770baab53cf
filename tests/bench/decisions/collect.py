"""Collects the corpus with real parts: SGLang answers the prompts and logs its states, SpecForge trains drafts on some
of them, the evaluator walks every draft over the others, and SGLang serves a part of those with every draft.

    python -m tests.bench.decisions.collect [--share .02] [--stage capture|train|walk|live|write]

About 75 minutes on two cores. Every stage leaves its result in TIDE_HOME/decisions and is not done again; ``write``
makes the files that the benchmarks read (``corpus.DATA``).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra import models
from tests.bench.decisions.drafts import train_all
from tests.bench.decisions.prompts import HASH_KEY, LONGEST, Chosen, choose
from tests.bench.decisions.tables import write_tables
from tests.support.sglang_server import SglangServer
from tide.demo.load import serve
from tide.demo.traffic import Prompt
from tide.domain import Split
from tide.engine.sglang import SglangEngine
from tide.evaluator.eagle3 import Eagle3Evaluator
from tide.files import write_durably
from tide.states.shards import read_manifest
from tide.trainer.specforge import SpecForgeTrainer

STEPS, TOKENS, CONCURRENCY, LIVE_PROMPTS, KEY = 3, 40, 32, 32, "collect"
STAGES = ("capture", "train", "walk", "live", "write")
SETTLED_S = 15.0
"""No new shard for three times the age at which the plugin closes one: all are written."""


def main() -> None:
    """Run the stages that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the prompts, for a trial")
    parser.add_argument("--stage", choices=STAGES, action="append", help="only these")
    args = parser.parse_args()
    tide_home = Path(os.environ.get("TIDE_HOME", ".tide")).absolute()
    home = tide_home / "decisions"
    home.mkdir(parents=True, exist_ok=True)
    model = models.ensure_target_model(tide_home)
    bundle = SpecForgeTrainer().prepare_bundle(model, home / "bundle", dtype="float32")
    for stage in args.stage or STAGES:
        began = time.monotonic()
        say(f"== {stage}")
        RUN[stage](home, model, bundle, args.share)
        say(f"== {stage}: {time.monotonic() - began:.0f} s")


def say(text: str) -> None:
    """One line of progress."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def capture(home: Path, model: Path, bundle: Path, share: float) -> None:
    """Answer every prompt without speculation; states go to the spool, workload by workload."""
    draft = models.untrained_draft(model, home)
    options: dict[str, Any] = {"draft": draft, "untrained": True, "steps": 0, "draft_tokens": 1, "threads": 2}
    env = {"TIDE_HASH_KEY": HASH_KEY, "TIDE_SHARD_AGE_S": "5"}
    missing = [w for w in LONGEST if not (home / f"answers-{w}.jsonl").exists()]
    if not missing:
        return
    with SglangServer(home, model, dtype="float32", spool=home / "spool", env=env, **options) as server:
        engine = SglangEngine(server.url, control_timeout_s=120)
        for workload in missing:
            chosen = choose(workload, share)
            for part, prompts in (("trained", chosen.trained), ("scored", chosen.scored)):
                answer(engine, prompts, f"{workload} {part}", home / f"answers-{workload}-{part}.jsonl")
                settle(home / "spool", f"{workload} {part}")
            join(home, workload)
        engine.close()


def join(home: Path, workload: str) -> None:
    """Answers of both parts in one file: the mark that a workload is complete."""
    parts = [(home / f"answers-{workload}-{part}.jsonl").read_bytes() for part in ("trained", "scored")]
    write_durably(home / f"answers-{workload}.jsonl", b"".join(parts))


def answer(engine: SglangEngine, prompts: Sequence[Prompt], what: str, path: Path) -> None:
    """Serve prompts; one JSON line an answer."""
    if path.exists():
        return
    lines: list[dict[str, Any]] = []
    result = serve(
        engine,
        prompts,
        workload=what,
        concurrency=CONCURRENCY,
        max_new_tokens=TOKENS,
        on_done=lambda _: progress(lines, what, len(prompts)),
    )
    if result.failed:
        raise SystemExit(f"{what}: {result.failed} requests failed: see the log of the server, and run again")
    for prompt, served in zip(prompts, result.served, strict=True):
        fields = served.generation.model_dump(exclude={"text"})
        lines.append({"workload": prompt.slice, "conversation": prompt.conversation, **fields})
    say(f"{what}: {result.output_tokens_per_s:.1f} tok/s, acceptance length {result.acceptance_length}")
    write_durably(path, "".join(json.dumps(line) + "\n" for line in lines if "conversation" in line).encode())


def progress(done: list[dict[str, Any]], what: str, total: int) -> None:
    """A line every 100 answers."""
    done.append({})
    if len(done) % 100 == 0:
        say(f"{what}: {len(done)}/{total}")


def settle(spool: Path, what: str) -> None:
    """Wait until the plugin has closed what it holds, so that no shard holds two parts."""
    count, quiet_since = -1, time.monotonic()
    while time.monotonic() - quiet_since < SETTLED_S:
        found = sum(
            len(read_manifest(p).requests) for p in spool.glob("*/*.safetensors") if p.with_suffix(".json").exists()
        )
        if found != count:
            count, quiet_since = found, time.monotonic()
        time.sleep(1.0)
    say(f"{what}: {count} requests in the spool")


def train(home: Path, model: Path, bundle: Path, share: float) -> None:
    """Every draft of the recipe that is not there yet."""
    train_all(home, bundle, share, say)


def walk(home: Path, model: Path, bundle: Path, share: float) -> None:
    """Every draft over every scored request."""
    shards = sorted((home / "spool" / "held_out").glob("*.safetensors"))
    for name, entry in json.loads((home / "drafts.json").read_text()).items():
        path = home / f"walk-{name}.json"
        if path.exists():
            continue
        began = time.monotonic()
        report = Eagle3Evaluator().evaluate(
            home / "drafts" / entry["digest"], shards, bundle=bundle, split=Split.GATE, steps=STEPS
        )
        write_durably(path, report.to_json().encode())
        say(f"walk {name}: {report.acceptance_length:.3f} in {time.monotonic() - began:.0f} s")


def live(home: Path, model: Path, bundle: Path, share: float) -> None:
    """Serve the first scored prompts of each workload with every draft, one after the other on one server."""
    drafts: dict[str, dict[str, Any]] = json.loads((home / "drafts.json").read_text())
    missing = [name for name in drafts if not (home / f"live-{name}.jsonl").exists()]
    if not missing:
        return
    chosen = [choose(w, share) for w in LONGEST]
    first = home / "drafts" / drafts[missing[0]]["digest"]
    options: dict[str, Any] = {"steps": STEPS, "draft_tokens": STEPS + 1, "threads": 2, "admin_key": KEY}
    with SglangServer(home, model, draft=first, draft_dir=home / "drafts", dtype="float32", **options) as server:
        engine = SglangEngine(server.url, admin_key=KEY, control_timeout_s=300)
        for name in missing:
            if engine.active_draft() != drafts[name]["digest"]:
                engine.swap_draft(drafts[name]["digest"])
            engine.flush_cache()  # what the draft before left of itself in the prefix cache is not this one's doing
            serve_live(engine, chosen, name, home)
        engine.close()


def serve_live(engine: SglangEngine, chosen: Sequence[Chosen], name: str, home: Path) -> None:
    """The same prompts for every draft."""
    parts = []
    for item in chosen:
        path = home / f"live-{name}-{item.workload}.jsonl"
        answer(engine, item.scored[:LIVE_PROMPTS], f"{name} on {item.workload}", path)
        parts.append(path.read_bytes())
    write_durably(home / f"live-{name}.jsonl", b"".join(parts))


def write(home: Path, model: Path, bundle: Path, share: float) -> None:
    """The files that the benchmarks read."""
    write_tables(home)


RUN = {"capture": capture, "train": train, "walk": walk, "live": live, "write": write}

if __name__ == "__main__":
    main()
