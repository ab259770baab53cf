"""lakeFS on S3: bytes by presigned addresses that expire, over a network that is narrow, stalls and breaks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import ports
from infra.lakefs.server import LakefsServer
from infra.versitygw.server import S3Gateway
from tests.support.slow_link import SlowLink
from tests.support.team_lakefs import TeamLakefs
from tide.errors import AddressRefused, AlreadyExists, NotFound, StoreError, StoreUnavailable
from tide.store.lakefs import LakefsStore
from tide.store.lakefs_upload import Uploader

_NUMBER = itertools.count()
EXPIRY_S = 2
MIB = 1 << 20


@pytest.fixture(scope="module")
def link(s3_gateway: S3Gateway) -> Iterator[SlowLink]:
    with SlowLink(s3_gateway.endpoint) as link:
        yield link


@pytest.fixture(scope="module")
def server(s3_gateway: S3Gateway, link: SlowLink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakefsServer]:
    """Signs addresses that last two seconds, and that lead over the link."""
    settings = s3_gateway.lakefs_settings() | {
        "LAKEFS_BLOCKSTORE_S3_PRE_SIGNED_EXPIRY": f"{EXPIRY_S}s",
        "LAKEFS_BLOCKSTORE_S3_PRE_SIGNED_ENDPOINT": link.url,
    }
    home = tmp_path_factory.mktemp("expiring")
    with LakefsServer(home, port=ports.free_port(), settings=settings) as running:
        yield running


@pytest.fixture
def repo() -> str:
    return f"s3-{next(_NUMBER)}"


def _store(server: LakefsServer, repo: str) -> LakefsStore:
    keys = server.credentials
    store = LakefsStore(
        server.endpoint, keys.access_key, keys.secret_key, "s3://tide/", attempts=3, sleep=lambda _: None
    )
    store.create_repository(repo)
    return store


@pytest.fixture
def store(server: LakefsServer, link: SlowLink, repo: str) -> LakefsStore:
    made = _store(server, repo)
    link.reset()
    return made


def _file(folder: Path, mib: int) -> Path:
    path = folder / "shard"
    path.write_bytes(os.urandom(MIB) * mib)
    return path


def test_bytes_go_to_the_storage_and_come_back_past_the_server(store: LakefsStore, repo: str, link: SlowLink) -> None:
    store.put(repo, "main", "a", b"1")
    assert store.read(repo, "main", "a") == b"1"
    assert link.requests == ["PUT", "GET"]


def test_a_throttled_upload_outlasts_the_address_it_began_with(
    store: LakefsStore, repo: str, link: SlowLink, tmp_path: Path
) -> None:
    source, began = _file(tmp_path, 64), time.monotonic()
    link.bytes_per_s = 64 * MIB / (1.5 * EXPIRY_S)
    store.put(repo, "main", "shard", source)
    assert time.monotonic() - began > EXPIRY_S
    link.bytes_per_s = None
    store.download(repo, "main", "shard", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_an_address_that_expired_before_it_was_used_is_renewed(store: LakefsStore, repo: str, link: SlowLink) -> None:
    link.stall_s = EXPIRY_S + 1.5
    store.put(repo, "main", "a", b"1")
    assert link.requests == ["PUT", "PUT"]
    link.stall_s = EXPIRY_S + 1.5
    assert store.read(repo, "main", "a") == b"1"
    assert link.requests == ["PUT", "PUT", "GET", "GET"]


def test_an_upload_that_was_cut_off_is_sent_again_to_a_new_address(
    store: LakefsStore, repo: str, link: SlowLink, tmp_path: Path
) -> None:
    source = _file(tmp_path, 8)
    link.cut_uploads_after = 3 * MIB
    store.put(repo, "main", "shard", source, if_absent=True)
    assert link.requests == ["PUT", "PUT"]
    assert store.read(repo, "main", "shard") == source.read_bytes()


def test_a_slow_reader_reads_on_after_connection_and_address_have_ended(
    store: LakefsStore, repo: str, link: SlowLink, tmp_path: Path
) -> None:
    source = _file(tmp_path, 32)
    store.put(repo, "main", "shard", source)
    link.cut_downloads_after = 4 * MIB
    read = bytearray()
    with store.open(repo, "main", "shard") as stream:
        read += stream.read(MIB)
        time.sleep(EXPIRY_S + 1)
        while data := stream.read(MIB):
            read += data
    assert read == source.read_bytes()
    assert link.requests == ["PUT", "GET", "GET"]


def test_reading_200_objects_takes_longer_than_an_address_lasts(store: LakefsStore, repo: str, link: SlowLink) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: store.put(repo, "main", f"shards/{i:03d}", bytes([i])), range(200)))
    began = time.monotonic()
    for i, item in enumerate(list(store.list(repo, "main", "shards/"))):
        assert store.read(repo, "main", item.path) == bytes([i])
        time.sleep(1.5 * EXPIRY_S / 200)
    assert time.monotonic() - began > EXPIRY_S


def test_an_object_rewritten_while_it_is_read_is_not_mixed_with_the_new_one(
    store: LakefsStore, repo: str, link: SlowLink, tmp_path: Path
) -> None:
    store.put(repo, "main", "shard", _file(tmp_path, 16))
    link.cut_downloads_after = 4 * MIB
    with store.open(repo, "main", "shard") as stream:
        stream.read(MIB)
        store.put(repo, "main", "shard", _file(tmp_path, 16))
        with pytest.raises(StoreError, match="path shard: the object was rewritten while it was read"):
            stream.read()


def test_a_write_that_loses_the_race_for_a_name_is_refused_after_its_upload(
    store: LakefsStore, server: LakefsServer, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have looked before either has written.
    monkeypatch.setattr(Uploader, "_refuse_existing", lambda *_: None)
    store.put(repo, "main", "once", b"first", if_absent=True)
    with pytest.raises(AlreadyExists, match="once"):
        store.put(repo, "main", "once", b"second", if_absent=True)
    assert store.read(repo, "main", "once") == b"first"


def test_nothing_is_sent_for_a_taken_name(store: LakefsStore, repo: str, link: SlowLink, tmp_path: Path) -> None:
    store.put(repo, "main", "once", b"first", if_absent=True)
    with pytest.raises(AlreadyExists, match="not to be rewritten"):
        store.put(repo, "main", "once", _file(tmp_path, 1), if_absent=True)
    assert link.requests == ["PUT"]


def test_a_write_whose_answer_was_lost_is_not_taken_for_somebody_elses(
    store: LakefsStore, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = store._api.staging_api
    link_address, calls = staging.link_physical_address, []

    def answers_into_the_void(*args: object, **kwargs: object) -> object:
        calls.append(args)
        answer = link_address(*args, **kwargs)
        if len(calls) == 1:
            raise ConnectionResetError("the answer is lost")
        return answer

    monkeypatch.setattr(staging, "link_physical_address", answers_into_the_void)
    assert store.put(repo, "main", "once", b"1", if_absent=True).size == 1
    assert len(calls) == 2


def test_addresses_that_are_always_refused_end_with_what_to_check_and_without_the_address(
    store: LakefsStore, repo: str, link: SlowLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(repo, "main", "a", b"1")
    send = store._lakefs.http.request

    def tampered(method: str, url: str, **kwargs: object) -> object:
        return send(method, url.replace("X-Amz-Signature=", "X-Amz-Signature=0"), **kwargs)

    monkeypatch.setattr(store._lakefs.http, "request", tampered)
    with pytest.raises(AddressRefused, match=rf"(?s)repository {repo}.*path b.*HTTP 403.*pre_signed_expiry") as caught:
        store.put(repo, "main", "b", b"1")
    assert "X-Amz" not in str(caught.value)
    with pytest.raises(AddressRefused, match="path a"):
        store.read(repo, "main", "a")
    assert link.requests == ["PUT"] + ["PUT"] * 3 + ["GET"] * 3, "a new address for every try, and an end of trying"
    with pytest.raises(NotFound):
        store.read(repo, "main", "b")


def test_storage_that_does_not_answer_is_named_without_the_address(
    server: LakefsServer, s3_gateway: S3Gateway, repo: str, tmp_path: Path
) -> None:
    settings = s3_gateway.lakefs_settings()
    settings["LAKEFS_BLOCKSTORE_S3_PRE_SIGNED_ENDPOINT"] = f"http://127.0.0.1:{ports.free_port()}"
    with LakefsServer(tmp_path, port=ports.free_port(), settings=settings) as elsewhere:
        store = _store(elsewhere, repo)
        with pytest.raises(StoreUnavailable, match=r"path a: no answer.*127\.0\.0\.1") as caught:
            store.put(repo, "main", "a", b"1")
    assert "X-Amz" not in str(caught.value)


def test_keys_of_a_team_are_in_postgresql(team_lakefs: TeamLakefs) -> None:
    if team_lakefs.postgres_port is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql): lakeFS on it was NOT verified here")
    assert not (team_lakefs.server.folder / "kv").exists()
