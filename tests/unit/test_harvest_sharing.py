"""Two spools that are wrongly harvested under one replica's name, at every interleaving of their calls to the store."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.crashing_store import Crash, CrashPoint, crashing
from tests.fakes.memory_store import MemoryStore
from tests.support.harvested import Delivered, read_back, spooled
from tests.support.spooled import START, WINDOW_S, add_segment, add_shard, harvester_of
from tide.errors import Conflict
from tide.states.spool import window_of
from tide.store.base import Store

REPO = "svc-states"
SUBJECT = f"{window_of(START, WINDOW_S)}/r0"


class Visit(CrashPoint):
    """Something that happens before the chosen step, once."""

    def __init__(self, at: int | None, happens: Callable[[], None]) -> None:
        super().__init__()
        self.when, self.happens = at, happens

    def step(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.steps == self.when:
            self.happens()
        return super().step(action, *args, **kwargs)


def _harvest(store: Store, spool: Path) -> bool:
    """False when the run ended because it met the other one."""
    harvester = harvester_of(store, spool, REPO)
    try:
        harvester.run(START + WINDOW_S)
    except Conflict:
        return False
    return True


def _with_shards(spool: Path, seed: int) -> None:
    add_shard(spool, seed)
    add_segment(spool, seed)


def _segments_only(spool: Path, seed: int) -> None:
    add_segment(spool, seed)


@pytest.fixture(scope="module", params=[_with_shards, _segments_only], ids=["shards", "request tables alone"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two spools with one window each."""
    folder = tmp_path_factory.mktemp("filled")
    request.param(folder / "a", 1)
    request.param(folder / "b", 2)
    return folder


def _delivered(filled: Path) -> Delivered:
    shards = {p.stem for p in filled.rglob("train/*.safetensors")}
    return Delivered(shards=shards, requests={f"{seed:064x}" for seed in (1, 2)})


def _nothing_missing(store: MemoryStore, spools: list[Path], filled: Path, when: str) -> None:
    """Each file is on main or in its spool: as long as one of the two has it, nothing is lost."""
    left = spooled(*spools)
    delivered = _delivered(filled)
    found = read_back(store, REPO, Delivered(shards=delivered.shards - left))
    assert found.lost == [], when
    if not any((s / "requests").exists() and any((s / "requests").glob("*.json")) for s in spools):
        assert read_back(store, REPO, delivered).lost == [], when


def _healed(store: MemoryStore, spools: list[Path], filled: Path, when: str) -> None:
    for spool in spools * 2:
        _harvest(store, spool)
    delivered = _delivered(filled)
    delivered.windows[SUBJECT] = 2
    found = read_back(store, REPO, delivered)
    assert (found.lost, found.doubled) == ([], []), when
    assert spooled(*spools) == set(), when
    assert list(store.branches(REPO)) == ["main"], when


def _calls(filled: Path, tmp_path: Path) -> int:
    spool, store, point = tmp_path / "count", MemoryStore(), CrashPoint()
    shutil.copytree(filled / "a", spool)
    _harvest(crashing(store, point), spool)
    return point.steps


def test_whoever_comes_in_between_loses_nothing_and_takes_nothing(filled: Path, tmp_path: Path) -> None:
    met = 0
    for at in range(_calls(filled, tmp_path)):
        store, home = MemoryStore(), tmp_path / str(at)
        shutil.copytree(filled, home)
        spools = [home / "a", home / "b"]
        visit = Visit(at, lambda store=store, spool=spools[1]: _harvest(store, spool))
        met += not _harvest(crashing(store, visit), spools[0])
        _nothing_missing(store, spools, filled, f"call {at}")
        _healed(store, spools, filled, f"call {at}")
    assert met > 0, "the two never met: the test saw nothing"


def test_a_harvester_that_dies_on_the_others_branch_takes_nothing_with_it(filled: Path, tmp_path: Path) -> None:
    calls = _calls(filled, tmp_path)
    for at in range(calls):
        for dies in range(at % 6, calls, 6):  # a sixth of all pairs, and every call in both roles
            store, home = MemoryStore(), tmp_path / f"{at}-{dies}"
            shutil.copytree(filled, home)
            spools, when = [home / "a", home / "b"], f"call {at}, the other dies at {dies}"

            def other(store: MemoryStore = store, spool: Path = spools[1], dies: int = dies) -> None:
                with contextlib.suppress(Crash):
                    _harvest(crashing(store, CrashPoint(dies, after=True)), spool)

            _harvest(crashing(store, Visit(at, other)), spools[0])
            _nothing_missing(store, spools, filled, when)
            _healed(store, spools, filled, when)
            shutil.rmtree(home)
