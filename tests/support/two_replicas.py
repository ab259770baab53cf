"""Two real SGLang servers in float32 behind one rollout: drafts with verdicts in a real store, and load on both.

Its drafts are told apart by acceptance where the target repeats a token (see ``drafts.ECHO_PROMPT``): ``echo`` is
accepted in full there, ``shuffled`` is echo with head and map in another order, ``dull`` has random weights. Used by a
test and by a benchmark. Knows nothing of what is asked of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.drafts import draft_tensors, echo_tensors, for_model
from tests.support.sglang_server import SglangServer
from tests.support.signed import AUTHORITY, KEY, put_verdict, verdict_on
from tide.canary.watch import CanaryWatch
from tide.domain import CanaryRefusal, DraftModel, LineageRecord, Promotion, TargetContract
from tide.engine.sglang import SglangEngine
from tide.evaluator.eagle3 import Eagle3Evaluator
from tide.models.draft_files import load_draft, write_draft, write_record
from tide.models.target_files import eagle3_layers, target_contract
from tide.policies import CanaryPolicy
from tide.repositories import CANDIDATE, ensure_drafts
from tide.serving.replicas import DRAFT_FILES
from tide.serving.rollout import Site, draft_prefix, read_serving, resume
from tide.store.base import Store
from tide.trainer.bundle import write_bundle

ADMIN, REPOSITORY = "two-replicas", "two-replicas-drafts"
POLICY = CanaryPolicy(max_requests=24, min_requests=8, wait_s=400, poll_s=0.5, answer_s=120, lease_s=900)
"""Ends by requests, within seconds on an idle machine; the times are for one that is not."""
TOKENS = 20


@dataclass
class Load:
    """What was asked and answered while it ran."""

    answers: dict[int, list[list[int]]] = field(default_factory=dict)
    """Token ids by number of the prompt, every time it was asked."""
    failed: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Answered ones."""
        return sum(map(len, self.answers.values()))


@dataclass
class Rig:
    """The servers, their clients, and how a candidate is promoted on them."""

    servers: list[SglangServer]
    engines: list[SglangEngine]
    store: Store
    site: Site
    watch: CanaryWatch
    drafts: dict[str, str]
    """Digest by name."""

    def active(self) -> list[str]:
        """Names of the drafts in serving."""
        names = {digest: name for name, digest in self.drafts.items()}
        return [names.get(digest, digest) for digest in (engine.active_draft() for engine in self.engines)]

    def promote(self, name: str, **changes: Any) -> Promotion | CanaryRefusal:
        """Give a draft a verdict against what serves now, and roll it out."""
        serving, digest = read_serving(self.store, REPOSITORY), self.drafts[name]
        incumbent = serving.stable.digest if serving.stable else "none"
        branch = f"{CANDIDATE}{name}"
        put_verdict(self.store, REPOSITORY, branch, verdict_on(digest, incumbent))
        return resume(replace(self.site, **{"watch": self.watch, **changes}), AUTHORITY, branch)

    def ask(self, number: int) -> list[int]:
        """One greedy answer, by the replica whose turn it is: to a token repeated behind another one."""
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": [1604 + number] + [198] * 30, "sampling_params": sampling}
        ids: list[int] = self.servers[number % len(self.servers)].post("/generate", body)["output_ids"]
        return ids

    def answers(self, numbers: Sequence[int], concurrency: int) -> dict[int, list[int]]:
        """Each asked once, so many at a time, with nothing else going on."""
        with ThreadPoolExecutor(concurrency) as pool:
            return dict(zip(numbers, pool.map(self.ask, numbers), strict=True))

    def under_load(self, prompts: Sequence[int], concurrency: int, work: Callable[[], Any]) -> tuple[Any, Load]:
        """Keep so many requests running while ``work`` runs; what it returned, and what was answered."""
        load, stop, turn, lock = Load(), threading.Event(), iter(range(10**9)), threading.Lock()

        def keep_asking() -> None:
            while not stop.is_set():
                with lock:
                    number = prompts[next(turn) % len(prompts)]
                try:
                    ids = self.ask(number)
                except httpx.HTTPError as error:
                    load.failed.append(repr(error))
                    continue
                with lock:
                    load.answers.setdefault(number, []).append(ids)

        with ThreadPoolExecutor(concurrency) as pool:
            running = [pool.submit(keep_asking) for _ in range(concurrency)]
            try:
                time.sleep(1.0)
                result = work()
                time.sleep(1.0)
            finally:
                stop.set()
            for future in running:
                future.result()
        return result, load

    def forget(self) -> None:
        """Drop the prefix caches: what follows is served as if it had never been asked."""
        for engine in self.engines:
            engine.flush_cache()

    def scheduler(self, replica: int) -> psutil.Process:
        """The scheduler process of a replica."""
        process = self.servers[replica].process
        assert process is not None
        children = psutil.Process(process.record.pid).children(recursive=True)
        (found,) = [p for p in children if "scheduler" in " ".join(p.cmdline())]
        return found


@contextlib.contextmanager
def two_replicas(home: Path, model: Path, store: Store) -> Iterator[Rig]:
    """Both servers with ``dull`` in serving as generation 1, and candidates by the other names."""
    target = target_contract(model, eagle3_layers(model), "float32")
    bundle = write_bundle(model, home / "bundle", target)
    drafts = _candidates(home / "made", model, target, store)
    folder, spool = home / "drafts", home / "spool"
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                SglangServer(
                    home / f"r{number}",
                    model,
                    draft=home / "made" / drafts["dull"],
                    draft_dir=folder,
                    spool=spool,
                    admin_key=ADMIN,
                    dtype="float32",
                    env={"TIDE_CPU_OVERLAP": "1", "TIDE_PUBLIC_KEYS": KEY.public, "TIDE_SHARD_AGE_S": "2"},
                )
            )
            for number in range(2)
        ]
        engines = [
            SglangEngine(s.url, name=f"r{n}", admin_key=ADMIN, control_timeout_s=30) for n, s in enumerate(servers)
        ]
        for engine in engines:
            stack.callback(engine.close)
        site = Site(store, REPOSITORY, engines, folder, policy=POLICY)
        watch = CanaryWatch(spool, home / "scratch", folder, bundle, Eagle3Evaluator, POLICY)
        rig = Rig(servers, engines, store, site, watch, drafts)
        rig.promote("dull", policy=POLICY.model_copy(update={"max_requests": 0}))
        yield rig


def _candidates(folder: Path, model: Path, target: TargetContract, store: Store) -> dict[str, str]:
    """A branch for each draft."""
    config = for_model(model)
    tensors = {
        "dull": draft_tensors(config, 1),
        "dim": draft_tensors(config, 2),
        "echo": echo_tensors(model, config),
        "shuffled": echo_tensors(model, config, seed=5),
    }
    ensure_drafts(store, REPOSITORY)
    made = {}
    for name, values in tensors.items():
        path, digest = write_draft(folder, config, values)
        write_record(path, DraftModel(digest=digest, contract=load_draft(path).contract, target=target))
        branch = f"{CANDIDATE}{name}"
        store.create_branch(REPOSITORY, branch, "main")
        for file in DRAFT_FILES:
            store.put(REPOSITORY, branch, draft_prefix(digest) + file, path / file)
        store.commit(REPOSITORY, branch, "candidate", LineageRecord(kind="candidate", subject=digest).to_metadata())
        made[name] = digest
    return made
