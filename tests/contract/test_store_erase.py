"""What every store promises of the bytes behind its versions, on the fake and on a real lakeFS with local blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.lakefs.server import LakefsServer
from tests.fakes.memory_store import MemoryStore
from tide.errors import ConfigError, Gone, NotFound, StoreError
from tide.store.base import Store
from tide.store.lakefs import LakefsStore
from tide.store.lakefs_erase import BlockAccess

_NUMBER = itertools.count()
SECRET = b"what must go " * 50


@dataclass(frozen=True)
class Subject:
    store: Store
    repo: str
    blocks: Path | None

    def raw(self) -> bytes:
        """All bytes of the repository's part of the block store."""
        if isinstance(self.store, MemoryStore):
            return b"".join(self.store.blocks(self.repo))
        assert self.blocks is not None
        return b"".join(p.read_bytes() for p in (self.blocks / self.repo).rglob("*") if p.is_file())


@pytest.fixture(params=["memory", "lakefs"])
def subject(request: pytest.FixtureRequest) -> Subject:
    repo = f"erase-contract-{next(_NUMBER)}"
    if request.param == "memory":
        found = Subject(MemoryStore(), repo, None)
    else:
        server: LakefsServer = request.getfixturevalue("lakefs_server")
        found = Subject(_lakefs(server, BlockAccess(server.blocks)), repo, server.blocks)
    found.store.create_repository(repo)
    return found


def _lakefs(server: LakefsServer, blocks: BlockAccess) -> LakefsStore:
    keys = server.credentials
    return LakefsStore(server.endpoint, keys.access_key, keys.secret_key, blocks=blocks)


def _commit(subject: Subject, path: str, data: bytes) -> str:
    subject.store.put(subject.repo, "main", path, data)
    return subject.store.commit(subject.repo, "main", path, {}).id


def test_erased_bytes_are_gone_at_every_ref_and_from_the_block_store(subject: Subject) -> None:
    store, repo = subject.store, subject.repo
    old = _commit(subject, "a", SECRET)
    store.create_branch(repo, "side", "main")
    store.tag(repo, "then", old)
    store.delete(repo, "main", "a")
    store.commit(repo, "main", "remove", {})
    assert SECRET in subject.raw()
    assert store.erase_bytes(repo, store.physical_address(repo, old, "a")) is True
    for ref in (old, "side", "then"):
        with pytest.raises(Gone, match="path a"):
            store.read(repo, ref, "a")
        with pytest.raises(Gone), store.open(repo, ref, "a"):
            pytest.fail("opened an object without bytes")
    assert SECRET not in subject.raw()
    assert [o.path for o in store.list(repo, old)] == ["a"]


def test_erasing_again_is_harmless_and_says_that_nothing_was_there(subject: Subject) -> None:
    commit = _commit(subject, "a", SECRET)
    address = subject.store.physical_address(subject.repo, commit, "a")
    assert subject.store.erase_bytes(subject.repo, address) is True
    assert subject.store.physical_address(subject.repo, commit, "a") == address
    assert subject.store.erase_bytes(subject.repo, address) is False


def test_the_same_content_written_again_has_bytes_of_its_own(subject: Subject) -> None:
    store, repo = subject.store, subject.repo
    old = _commit(subject, "a", SECRET)
    store.put(repo, "main", "b", SECRET)
    new = store.commit(repo, "main", "again", {}).id
    assert store.physical_address(repo, old, "a") != store.physical_address(repo, new, "b")
    store.erase_bytes(repo, store.physical_address(repo, old, "a"))
    assert store.read(repo, new, "b") == SECRET


def test_commits_and_merges_share_the_bytes_of_what_they_do_not_change(subject: Subject) -> None:
    store, repo = subject.store, subject.repo
    store.create_branch(repo, "side", "main")
    store.put(repo, "side", "a", SECRET)
    made = store.commit(repo, "side", "add", {}).id
    merged = store.merge(repo, "side", "main", "merge", {}).id
    assert store.physical_address(repo, made, "a") == store.physical_address(repo, merged, "a")


def test_staged_bytes_can_be_erased_too(subject: Subject) -> None:
    store, repo = subject.store, subject.repo
    store.create_branch(repo, "side", "main")
    store.put(repo, "side", "a", SECRET)
    assert store.erase_bytes(repo, store.physical_address(repo, "side", "a"))
    assert SECRET not in subject.raw()


def test_the_bytes_of_another_repository_are_refused(subject: Subject) -> None:
    store, repo = subject.store, subject.repo
    other = f"{repo}-other"
    store.create_repository(other)
    store.put(other, "main", "a", SECRET)
    with pytest.raises(StoreError, match=repo):
        store.erase_bytes(repo, store.physical_address(other, "main", "a"))
    assert store.read(other, "main", "a") == SECRET


def test_what_is_missing_is_named(subject: Subject) -> None:
    with pytest.raises(NotFound, match="no-such-path"):
        subject.store.physical_address(subject.repo, "main", "no-such-path")
    with pytest.raises(NotFound, match="no-such-repository"):
        subject.store.require_erasable("no-such-repository")
    with pytest.raises(NotFound, match="no-such-repository"):
        subject.store.expires_after("no-such-repository")


def test_garbage_collection_days_are_kept(subject: Subject) -> None:
    assert subject.store.expires_after(subject.repo) is None
    for days in (30, 7):
        subject.store.expire_after(subject.repo, days)
        assert subject.store.expires_after(subject.repo) == days


def test_without_the_block_folder_nothing_is_erased_and_the_setting_is_named(
    lakefs_server: LakefsServer, tmp_path: Path
) -> None:
    repo = f"erase-contract-{next(_NUMBER)}"
    for blocks in (BlockAccess(), BlockAccess(tmp_path)):
        store = _lakefs(lakefs_server, blocks)
        store.create_repository(repo)
        store.put(repo, "main", "a", SECRET)
        address = store.physical_address(repo, "main", "a")
        for attempt in (lambda s=store: s.require_erasable(repo), lambda s=store, a=address: s.erase_bytes(repo, a)):
            with pytest.raises(ConfigError, match="TIDE_LAKEFS_BLOCKS"):
                attempt()
        assert store.read(repo, "main", "a") == SECRET


@pytest.mark.parametrize("address", ["local://blocks/REPO/../other/data/x", "local:///etc/passwd", "s3://REPO/data/x"])
def test_an_address_outside_the_repository_is_never_touched(tmp_path: Path, address: str) -> None:
    (tmp_path / "REPO").mkdir()
    (tmp_path / "other" / "data").mkdir(parents=True)
    (tmp_path / "other" / "data" / "x").write_bytes(SECRET)
    with pytest.raises(StoreError, match="not under the repository's namespace"):
        BlockAccess(tmp_path).erase("local://REPO", address)
    assert (tmp_path / "other" / "data" / "x").read_bytes() == SECRET
