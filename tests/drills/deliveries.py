"""What a drill puts into spools: small real shards and request tables, late ones and broken ones among them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.harvested import Delivered
from tests.support.spooled import START, WINDOW_S, add_segment, add_shard, truncate
from tide.domain import Split
from tide.states.spool import window_of


@dataclass
class Spools:
    """Spools of some replicas, filled round by round, each round in windows of its own."""

    home: Path
    replicas: tuple[str, ...]
    rng: random.Random
    good: Delivered = field(default_factory=Delivered)
    broken: set[str] = field(default_factory=set)
    """Names of shards that belong in quarantine."""
    window: int = 0
    """Windows that have begun."""
    seed: int = 0

    @property
    def now(self) -> float:
        """A time at which every window so far has ended; seconds since the epoch."""
        return START + self.window * WINDOW_S

    def folder(self, replica: str) -> Path:
        """Spool of a replica."""
        return self.home / replica

    def fill(self) -> None:
        """One or two new windows for every replica, and now and then files that come late for an old one."""
        begins = [self.window + i for i in range(self.rng.randint(1, 2))]
        late = [self.rng.randrange(self.window)] if self.window and self.rng.random() < 0.3 else []
        self.window += len(begins)
        for replica in self.replicas:
            for number in [*late, *begins]:
                self._deliver(replica, START + number * WINDOW_S)

    def left(self) -> list[str]:
        """Files that a completed harvest should not have left, and broken ones that are not in quarantine."""
        folders = [self.folder(r) / kind for r in self.replicas for kind in ("train", "held_out", "requests")]
        files = [str(path) for folder in folders for path in folder.glob("[!.]*")]
        kept = {path.stem for r in self.replicas for path in (self.folder(r) / "quarantine").glob("*.safetensors")}
        return files + sorted(self.broken - kept)

    def _deliver(self, replica: str, begin: float) -> None:
        spool = self.folder(replica)
        self.good.windows[f"{window_of(begin, WINDOW_S)}/{replica}"] += 1
        for split in [Split.TRAIN] * self.rng.randint(1, 3) + [Split.GATE] * self.rng.randint(0, 1):
            shard = add_shard(spool, *self._seeds(2), at=self._moment(begin), split=split)
            self.good.shards.add(shard.name)
        for _ in range(self.rng.randint(1, 2)):
            seeds = self._seeds(3)
            add_segment(spool, *seeds, at=self._moment(begin))
            self.good.requests |= {f"{seed:064x}" for seed in seeds}
        if self.rng.random() < 0.2:
            bad = add_shard(spool, *self._seeds(1), at=self._moment(begin))
            truncate(spool / "train" / bad.file)
            self.broken.add(bad.name)

    def _moment(self, begin: float) -> float:
        return begin + self.rng.uniform(6, WINDOW_S - 1)

    def _seeds(self, count: int) -> list[int]:
        self.seed += count
        return list(range(self.seed - count, self.seed))
