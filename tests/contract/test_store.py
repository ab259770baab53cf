"""What every store promises, run on the in-memory fake, bare and with a listener, and on a real lakeFS server."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from lakefs.client import Client

from infra.lakefs.server import LakefsServer
from tests.fakes.memory_store import MemoryStore
from tide.errors import (
    AlreadyExists,
    Conflict,
    Gone,
    NotFound,
    NothingToCommit,
    ProtectedBranch,
    StoreError,
)
from tide.store.base import Store
from tide.store.lakefs import LakefsStore
from tide.store.telling import telling

_NUMBER = itertools.count()


@dataclass(frozen=True)
class Subject:
    """A store, an empty repository in it, and two things that only its keeper can do."""

    store: Store
    repository: str
    protect: Callable[[str], None]
    lose_bytes: Callable[[str, str], None]


@pytest.fixture(params=["memory", "telling", "lakefs", "team lakefs"])
def subject(request: pytest.FixtureRequest) -> Subject:
    repository = f"contract-{next(_NUMBER)}"
    if request.param in ("memory", "telling"):
        memory = MemoryStore()
        memory.create_repository(repository)
        return Subject(
            memory if request.param == "memory" else telling(memory, lambda *_: None),
            repository,
            lambda branch: memory.protect(repository, branch),
            lambda ref, path: memory.lose_bytes(repository, ref, path),
        )
    if request.param == "lakefs":
        server = request.getfixturevalue("lakefs_server")
        return _real(server, repository, "local://", lambda at: server.folder / at.removeprefix("local://"))
    team = request.getfixturevalue("team_lakefs")
    return _real(team.server, repository, team.gateway.namespace_prefix, team.gateway.file)


def _real(server: LakefsServer, repository: str, namespaces: str, file_at: Callable[[str], Path]) -> Subject:
    keys = server.credentials
    store = LakefsStore(server.endpoint, keys.access_key, keys.secret_key, namespaces)
    store.create_repository(repository)
    sdk = Client(host=server.endpoint, username=keys.access_key, password=keys.secret_key).sdk_client

    def protect(branch: str) -> None:
        store.protect(repository, branch)
        # Rules are cached for some seconds once they were read: set them before the first write.
        with pytest.raises(ProtectedBranch):
            store.put(repository, branch, "probe", b"")

    def lose_bytes(ref: str, path: str) -> None:
        file_at(sdk.objects_api.stat_object(repository, ref, path).physical_address).unlink()

    return Subject(store, repository, protect, lose_bytes)


@pytest.fixture
def store(subject: Subject) -> Store:
    return subject.store


@pytest.fixture
def repo(subject: Subject) -> str:
    return subject.repository


def _committed(store: Store, repo: str, branch: str, path: str, data: bytes) -> str:
    store.create_branch(repo, branch, "main")
    store.put(repo, branch, path, data)
    return store.commit(repo, branch, f"add {path}", {}).id


def test_a_repository_can_be_created_twice_and_is_listed(store: Store, repo: str) -> None:
    assert store.create_repository(repo) is False
    assert store.create_repository(f"{repo}-new") is True
    assert repo in list(store.repositories())
    assert list(store.branches(repo)) == ["main"]


def test_protection_is_listed_and_a_second_branch_does_not_lift_the_first(store: Store, repo: str) -> None:
    assert store.protected(repo) == ()
    for branch in ("main", "ledger", "main"):
        store.protect(repo, branch)
    assert sorted(store.protected(repo)) == ["ledger", "main"]


def test_an_object_is_read_back_whole_streamed_and_to_a_file(store: Store, repo: str, tmp_path: Path) -> None:
    info = store.put(repo, "main", "a/ü é.bin", b"hello")
    assert info.size == 5
    assert store.read(repo, "main", "a/ü é.bin") == b"hello"
    with store.open(repo, "main", "a/ü é.bin") as stream:
        assert (stream.read(2), stream.read()) == (b"he", b"llo")
    store.download(repo, "main", "a/ü é.bin", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"hello"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_object_is_an_object(store: Store, repo: str) -> None:
    store.put(repo, "main", "empty", b"")
    assert store.read(repo, "main", "empty") == b""
    assert [o.size for o in store.list(repo, "main")] == [0]


def test_64_mib_pass_through_a_stream_unchanged(store: Store, repo: str, tmp_path: Path) -> None:
    source = tmp_path / "big"
    block = os.urandom(1 << 20)
    source.write_bytes(block * 64)
    store.put(repo, "main", "big", source)
    digest = hashlib.sha256()
    with store.open(repo, "main", "big") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    assert digest.hexdigest() == hashlib.sha256(block * 64).hexdigest()
    store.download(repo, "main", "big", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == 64 << 20


def test_an_object_written_once_is_not_rewritten(store: Store, repo: str) -> None:
    store.put(repo, "main", "once", b"1", if_absent=True)
    with pytest.raises(AlreadyExists, match="once"):
        store.put(repo, "main", "once", b"2", if_absent=True)
    assert store.read(repo, "main", "once") == b"1"
    store.put(repo, "main", "once", b"3")
    assert store.read(repo, "main", "once") == b"3"


def test_a_listing_has_more_than_a_thousand_objects_in_order_and_by_prefix(store: Store, repo: str) -> None:
    names = [f"many/{i:05d}" for i in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(repo, "main", name, b"x"), names))
    store.put(repo, "main", "other", b"x")
    assert [o.path for o in store.list(repo, "main", "many/")] == names
    assert len(list(store.uncommitted(repo, "main"))) == 1004
    commit = store.commit(repo, "main", "many", {})
    assert len(list(store.list(repo, commit.id))) == 1004
    assert len(list(store.diff(repo, commit.parents[0], commit.id))) == 1004


def test_more_than_a_thousand_branches_and_tags_are_listed(store: Store, repo: str) -> None:
    names = [f"b{i:04d}" for i in range(1001)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.create_branch(repo, name, "main"), names))
        list(pool.map(lambda name: store.tag(repo, f"tag-{name}", "main"), names))
    assert list(store.branches(repo)) == [*names, "main"]
    assert [name for name, _ in store.tags(repo)] == [f"tag-{name}" for name in names]


def test_a_log_runs_back_to_the_beginning_however_many_pages(
    store: Store, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tide.store.lakefs_client.PAGE", 3)
    made = []
    for i in range(8):
        store.put(repo, "main", "counter", str(i).encode())
        made.append(store.commit(repo, "main", f"commit {i}", {}).id)
    found = [commit.id for commit in store.log(repo, "main")]
    assert found[:-1] == made[::-1]
    assert store.head(repo, found[-1]).parents == ()


def test_a_commit_keeps_unicode_metadata_and_its_parent(store: Store, repo: str) -> None:
    before = store.head(repo, "main").id
    store.put(repo, "main", "a", b"1")
    made = store.commit(repo, "main", "größer 漢字", {"tide.kind": "states", "ключ": "значение 🌊"})
    head = store.head(repo, "main")
    assert head == made
    assert (head.message, head.parents) == ("größer 漢字", (before,))
    assert head.metadata == {"tide.kind": "states", "ключ": "значение 🌊"}
    assert abs(head.created_at - time.time()) < 10 * 365 * 86400


def test_a_commit_without_a_change_is_refused(store: Store, repo: str) -> None:
    with pytest.raises(NothingToCommit, match=repo):
        store.commit(repo, "main", "nothing", {})


def test_a_branch_sees_its_own_changes_only_and_may_be_made_twice(store: Store, repo: str) -> None:
    _committed(store, repo, "side", "a", b"1")
    head = store.head(repo, "side").id
    store.create_branch(repo, "side", "main")
    assert store.head(repo, "side").id == head
    with pytest.raises(NotFound, match="main"):
        store.read(repo, "main", "a")


def test_a_merge_brings_objects_and_metadata_and_both_parents(store: Store, repo: str) -> None:
    side, main = _committed(store, repo, "side", "a", b"1"), store.head(repo, "main").id
    merged = store.merge(repo, "side", "main", "merge it", {"tide.kind": "states"})
    assert store.head(repo, "main") == merged
    assert merged.parents == (main, side)
    assert merged.metadata == {"tide.kind": "states"}
    assert store.read(repo, "main", "a") == b"1"


def test_merging_again_is_nothing_to_commit(store: Store, repo: str) -> None:
    _committed(store, repo, "side", "a", b"1")
    store.merge(repo, "side", "main", "merge", {})
    with pytest.raises(NothingToCommit, match="side"):
        store.merge(repo, "side", "main", "merge once more", {})


def test_two_branches_that_change_one_object_conflict_and_nothing_is_merged(store: Store, repo: str) -> None:
    _committed(store, repo, "one", "same", b"1")
    _committed(store, repo, "two", "same", b"2")
    first = store.merge(repo, "one", "main", "first", {})
    with pytest.raises(Conflict, match="two into main"):
        store.merge(repo, "two", "main", "second", {})
    assert store.head(repo, "main").id == first.id
    assert store.read(repo, "main", "same") == b"1"


def test_two_branches_that_change_different_objects_both_merge(store: Store, repo: str) -> None:
    _committed(store, repo, "one", "a", b"1")
    _committed(store, repo, "two", "b", b"2")
    for branch in ("one", "two"):
        store.merge(repo, branch, "main", branch, {})
    assert [o.path for o in store.list(repo, "main")] == ["a", "b"]


def test_a_merge_into_a_branch_with_staged_changes_is_refused(store: Store, repo: str) -> None:
    _committed(store, repo, "side", "a", b"1")
    store.put(repo, "main", "b", b"2")
    with pytest.raises(Conflict, match="uncommitted"):
        store.merge(repo, "side", "main", "merge", {})


def test_a_branch_with_staged_objects_is_not_deleted(store: Store, repo: str) -> None:
    store.create_branch(repo, "side", "main")
    store.put(repo, "side", "precious", b"1")
    with pytest.raises(Conflict, match="side"):
        store.delete_branch(repo, "side")
    assert store.read(repo, "side", "precious") == b"1"
    store.reset(repo, "side")
    assert list(store.uncommitted(repo, "side")) == []
    store.delete_branch(repo, "side")
    assert "side" not in list(store.branches(repo))


def test_a_removed_object_is_gone_from_the_branch_and_stays_in_older_commits(store: Store, repo: str) -> None:
    old = _committed(store, repo, "side", "a", b"1")
    store.delete(repo, "side", "a")
    store.delete(repo, "side", "was never there")
    assert [(c.path, c.kind) for c in store.uncommitted(repo, "side")] == [("a", "removed")]
    new = store.commit(repo, "side", "remove", {}).id
    with pytest.raises(NotFound, match="path a"):
        store.read(repo, new, "a")
    assert store.read(repo, old, "a") == b"1"


def test_a_diff_names_what_changes_from_left_to_right(store: Store, repo: str) -> None:
    left = _committed(store, repo, "side", "a", b"1")
    store.put(repo, "side", "a", b"2")
    store.put(repo, "side", "b", b"3")
    right = store.commit(repo, "side", "change", {}).id
    assert [(c.path, c.kind) for c in store.diff(repo, left, right)] == [("a", "changed"), ("b", "added")]
    assert [(c.path, c.kind) for c in store.diff(repo, right, left)] == [("a", "changed"), ("b", "removed")]


def test_a_tag_never_moves(store: Store, repo: str) -> None:
    first = _committed(store, repo, "side", "a", b"1")
    store.tag(repo, "promoted-1", "side")
    store.tag(repo, "promoted-1", first)
    store.put(repo, "side", "a", b"2")
    store.commit(repo, "side", "later", {})
    with pytest.raises(AlreadyExists, match="promoted-1"):
        store.tag(repo, "promoted-1", "side")
    assert list(store.tags(repo)) == [("promoted-1", first)]
    assert store.read(repo, "promoted-1", "a") == b"1"


def test_branches_and_tags_share_their_names(store: Store, repo: str) -> None:
    store.create_branch(repo, "taken-by-branch", "main")
    store.tag(repo, "taken-by-tag", "main")
    with pytest.raises(AlreadyExists, match="taken-by-branch"):
        store.tag(repo, "taken-by-branch", "main")
    with pytest.raises(AlreadyExists, match="taken-by-tag"):
        store.create_branch(repo, "taken-by-tag", "main")


def test_a_protected_branch_refuses_writes_and_commits_and_takes_merges(subject: Subject) -> None:
    store, repo = subject.store, subject.repository
    subject.protect("main")
    _committed(store, repo, "side", "a", b"1")
    with pytest.raises(ProtectedBranch, match="main"):
        store.put(repo, "main", "b", b"2")
    with pytest.raises(ProtectedBranch, match="main"):
        store.delete(repo, "main", "b")
    with pytest.raises(ProtectedBranch, match="main"):
        store.commit(repo, "main", "direct", {})
    store.merge(repo, "side", "main", "merge", {})
    assert store.read(repo, "main", "a") == b"1"


def test_an_object_whose_bytes_were_deleted_is_gone_and_not_merely_missing(subject: Subject) -> None:
    store, repo = subject.store, subject.repository
    commit = _committed(store, repo, "side", "a", b"1")
    subject.lose_bytes("side", "a")
    with pytest.raises(Gone, match="path a"):
        store.read(repo, commit, "a")
    with pytest.raises(Gone, match="path a"), store.open(repo, commit, "a"):
        pytest.fail("opened an object without bytes")


def test_the_default_branch_is_not_deleted(store: Store, repo: str) -> None:
    with pytest.raises(ProtectedBranch, match="main"):
        store.delete_branch(repo, "main")


@pytest.mark.parametrize(
    "call",
    [
        lambda store, repo: store.read("no-such-repository", "main", "a"),
        lambda store, repo: store.put("no-such-repository", "main", "a", b"1"),
        lambda store, repo: list(store.branches("no-such-repository")),
        lambda store, repo: store.put(repo, "no-such-branch", "a", b"1"),
        lambda store, repo: store.delete(repo, "no-such-branch", "a"),
        lambda store, repo: store.delete_branch(repo, "no-such-branch"),
        lambda store, repo: store.create_branch(repo, "new", "no-such-ref"),
        lambda store, repo: store.commit(repo, "no-such-branch", "m", {}),
        lambda store, repo: store.merge(repo, "no-such-ref", "main", "m", {}),
        lambda store, repo: store.head(repo, "no-such-ref"),
        lambda store, repo: list(store.log(repo, "no-such-ref")),
        lambda store, repo: list(store.list(repo, "no-such-ref")),
        lambda store, repo: list(store.diff(repo, "no-such-ref", "main")),
        lambda store, repo: store.tag(repo, "v1", "no-such-ref"),
        lambda store, repo: store.read(repo, "main", "no-such-path"),
        lambda store, repo: store.open(repo, "main", "no-such-path").__enter__(),
    ],
)
def test_what_is_missing_is_named(store: Store, repo: str, call: Callable[[Store, str], object]) -> None:
    with pytest.raises(NotFound, match="no-such-"):
        call(store, repo)


def test_a_download_of_what_is_missing_leaves_no_file(store: Store, repo: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no-such-path"):
        store.download(repo, "main", "no-such-path", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_downloads_of_one_object_to_one_place_at_once_all_end_with_the_whole_file(
    store: Store, repo: str, tmp_path: Path
) -> None:
    content = os.urandom(1 << 20)
    store.put(repo, "main", "shared", content)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(store.download, repo, "main", "shared", tmp_path / "out") for _ in range(24)]:
            done.result()
    assert (tmp_path / "out").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names_with_a_slash_are_refused(store: Store, repo: str) -> None:
    for attempt in (
        lambda: store.create_repository("a/b"),
        lambda: store.create_branch(repo, "a/b", "main"),
        lambda: store.tag(repo, "a/b", "main"),
    ):
        with pytest.raises(StoreError, match="a/b"):
            attempt()


def test_listings_are_lazy_iterators(store: Store, repo: str) -> None:
    assert isinstance(store.list(repo, "main"), Iterator)
    assert isinstance(store.log(repo, "main"), Iterator)
