"""Many harvesters at once on a real lakeFS server: side by side as a team runs them, wrongly shared, and throttled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.lakefs.server import LakefsServer
from tests.support.flaky_proxy import FAULTS, FlakyProxy
from tests.support.harvested import Delivered, read_back, spooled
from tests.support.spooled import START, WINDOW_S, add_segment, add_shard, harvester_of
from tide import repositories
from tide.errors import Conflict, SpoolBusy
from tide.states.spool import window_of
from tide.store.lakefs import LakefsStore

AT_ONCE = 8
_NUMBER, _SEED = itertools.count(), itertools.count(1)
Connect = Callable[[], LakefsStore]


@pytest.fixture
def connect(lakefs_server: LakefsServer) -> Connect:
    keys = lakefs_server.credentials
    return lambda: LakefsStore(lakefs_server.endpoint, keys.access_key, keys.secret_key)


@pytest.fixture
def repo(connect: Connect) -> str:
    name = f"parallel-{next(_NUMBER)}-states"
    repositories.ensure(connect(), name)
    return name


def _fill(spool: Path, replica: str, windows: Sequence[int], delivered: Delivered) -> None:
    for number in windows:
        begin = START + number * WINDOW_S
        first, second = next(_SEED), next(_SEED)
        for seed in (first, second):
            delivered.shards.add(add_shard(spool, seed, at=begin + 10).name)
        add_segment(spool, first, second, at=begin + 20)
        delivered.requests |= {f"{seed:064x}" for seed in (first, second)}
        delivered.windows[f"{window_of(begin, WINDOW_S)}/{replica}"] += 1


def _harvest(store: LakefsStore, repo: str, spool: Path, replica: str) -> type[Exception] | None:
    """What it ended with, when that is one of the two things that meeting another harvester may end with."""
    harvester = harvester_of(store, spool, repo, replica)
    try:
        harvester.run(START + 100 * WINDOW_S)
    except (Conflict, SpoolBusy) as error:
        return type(error)
    return None


def _at_once(connect: Connect, repo: str, spools: Sequence[tuple[Path, str]]) -> list[type[Exception] | None]:
    with ThreadPoolExecutor(len(spools)) as pool:
        return list(pool.map(lambda pair: _harvest(connect(), repo, *pair), spools))


def _nothing_left(connect: Connect, repo: str, spools: Sequence[tuple[Path, str]]) -> None:
    assert spooled(*(spool for spool, _ in spools)) == set()
    assert list(connect().branches(repo)) == ["main"]


def test_eight_harvesters_at_once_on_windows_of_their_own_and_on_one_that_all_share(
    connect: Connect, repo: str, tmp_path: Path
) -> None:
    delivered, spools = Delivered(), [(tmp_path / f"r{i}", f"r{i}") for i in range(AT_ONCE)]
    for i, (spool, replica) in enumerate(spools):
        _fill(spool, replica, [i, AT_ONCE], delivered)
    assert _at_once(connect, repo, spools) == [None] * AT_ONCE
    found = read_back(connect(), repo, delivered)
    assert (found.lost, found.doubled) == ([], [])
    assert (found.shards, found.requests, found.commits) == (4 * AT_ONCE, 4 * AT_ONCE, 2 * AT_ONCE)
    _nothing_left(connect, repo, spools)


def test_one_spool_harvested_by_four_at_once_is_harvested_by_one(connect: Connect, repo: str, tmp_path: Path) -> None:
    delivered, spools = Delivered(), [(tmp_path, "r0")] * 4
    _fill(tmp_path, "r0", range(3), delivered)
    ends = _at_once(connect, repo, spools)
    assert set(ends) <= {None, SpoolBusy}
    assert None in ends
    found = read_back(connect(), repo, delivered)
    assert (found.lost, found.doubled, found.commits) == ([], [], 3)
    _nothing_left(connect, repo, spools)


def test_two_of_six_harvesters_that_share_a_replica_name_lose_and_double_nothing(
    connect: Connect, repo: str, tmp_path: Path
) -> None:
    """Round after round, so that they meet at many moments; between rounds a file is on main or in its spool."""
    delivered, met = Delivered(), 0
    spools = [(tmp_path / f"s{i}", f"r{min(i, 4)}") for i in range(6)]
    for number in range(6):
        for spool, replica in spools:
            _fill(spool, replica, [number], delivered)
        ends = _at_once(connect, repo, spools)
        assert ends[:4] == [None] * 4, "those with names of their own are not disturbed"
        met += sum(end is Conflict for end in ends[4:])
        left = spooled(*(spool for spool, _ in spools))
        assert read_back(connect(), repo, Delivered(shards=delivered.shards - left)).lost == []
    assert met > 0, "the two never met: the test saw nothing"
    for pair in spools:
        assert _harvest(connect(), repo, *pair) is None
    found = read_back(connect(), repo, delivered)
    assert (found.lost, found.doubled) == ([], [])
    _nothing_left(connect, repo, spools)


def test_harvests_through_a_server_that_throttles_fails_and_loses_answers_complete(
    lakefs_server: LakefsServer, connect: Connect, repo: str, tmp_path: Path
) -> None:
    delivered, spools = Delivered(), [(tmp_path / f"r{i}", f"r{i}") for i in range(4)]
    for spool, replica in spools:
        _fill(spool, replica, range(2), delivered)
    keys, proxy = lakefs_server.credentials, FlakyProxy(lakefs_server.endpoint, rate=0.2, seed=7)
    with proxy.running() as endpoint:

        def through() -> LakefsStore:
            wait = lambda seconds: time.sleep(min(seconds, 0.05))  # noqa: E731
            return LakefsStore(endpoint, keys.access_key, keys.secret_key, attempts=8, sleep=wait)

        assert _at_once(through, repo, spools) == [None] * 4
    assert set(proxy.answered) == set(FAULTS)
    found = read_back(connect(), repo, delivered)
    assert (found.lost, found.doubled, found.commits) == ([], [], 8)
    _nothing_left(connect, repo, spools)
