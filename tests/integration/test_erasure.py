"""Erasure on a real lakeFS server: every ref is read back, and the raw files of its block store are looked through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.lakefs.server import LakefsServer
from tests.support.erasing import DRAFT, SEED, SUBJECTS, eraser, filled, leaks
from tests.support.spooled import states
from tide import cli, wiring
from tide.domain import Erasure, ErasureDone
from tide.errors import Gone, StoreError
from tide.lineage import ledger
from tide.states import snapshots
from tide.store.lakefs import LakefsStore
from tide.store.lakefs_erase import BlockAccess


def blobs(server: LakefsServer, repository: str) -> list[bytes]:
    return [p.read_bytes() for p in (server.blocks / repository).rglob("*") if p.is_file()]


def lakefs(server: LakefsServer) -> LakefsStore:
    keys = server.credentials
    return LakefsStore(server.endpoint, keys.access_key, keys.secret_key, blocks=BlockAccess(server.blocks))


def read_back(store: LakefsStore, repository: str) -> tuple[int, int, list[bytes]]:
    """Every object at every commit of every ref: how many are read, how many are gone, and the bytes read."""
    refs = [*store.branches(repository), *(name for name, _ in store.tags(repository))]
    commits = {c.id for ref in refs for c in store.log(repository, ref)}
    read, gone, contents = 0, 0, []
    for commit in commits:
        for item in store.list(repository, commit):
            try:
                contents.append(store.read(repository, commit, item.path))
                read += 1
            except Gone:
                gone += 1
    return read, gone, contents


def test_a_conversation_is_gone_at_every_ref_and_from_every_file_of_the_block_store(
    lakefs_server: LakefsServer, tmp_path: Path
) -> None:
    store, repo, drafts = lakefs(lakefs_server), "erased-states", "erased-drafts"
    filled(store, repo, drafts, tmp_path / "spool")
    store.tag(repo, "then", "main")
    assert "token ids" in leaks(blobs(lakefs_server, repo))
    before = read_back(store, repo)
    assert before[1] == 0
    eraser(store, repo, drafts, tmp_path).run(SUBJECTS)
    _, gone, contents = read_back(store, repo)
    assert gone > 0
    assert leaks(contents) == []
    assert leaks(blobs(lakefs_server, repo)) == []
    snapshot = snapshots.describe(store, repo)
    assert (snapshot.shards, snapshot.requests) == (3, 4)
    assert states(1).input_ids.numpy().tobytes() in b"".join(blobs(lakefs_server, repo)), "the others are still there"
    with pytest.raises(Gone):
        snapshots.describe(store, repo, "then")
    [record] = ledger.every(store, drafts, ledger.ERASURE, Erasure)
    assert record.drafts == (DRAFT,)


def test_the_wrong_block_folder_is_noticed_and_the_right_one_completes(
    lakefs_server: LakefsServer, tmp_path: Path
) -> None:
    """A copy of the folder has the repository's part too: only reading back tells."""
    repo, drafts = "misled-states", "misled-drafts"
    store = lakefs(lakefs_server)
    filled(store, repo, drafts, tmp_path / "spool")
    (tmp_path / "copy" / repo).mkdir(parents=True)
    keys = lakefs_server.credentials
    misled = LakefsStore(
        lakefs_server.endpoint, keys.access_key, keys.secret_key, blocks=BlockAccess(tmp_path / "copy")
    )
    with pytest.raises(StoreError, match=r"still served.*TIDE_LAKEFS_BLOCKS"):
        eraser(misled, repo, drafts, tmp_path).run(SUBJECTS)
    assert ledger.every(store, drafts, ledger.ERASED, ErasureDone) == []
    eraser(store, repo, drafts, tmp_path).run(SUBJECTS)
    assert len(ledger.every(store, drafts, ledger.ERASED, ErasureDone)) == 1
    assert leaks(blobs(lakefs_server, repo)) == []


def test_the_command_erases_by_hash_and_says_what_it_did(
    lakefs_server: LakefsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = lakefs(lakefs_server)
    filled(store, "command-states", "command-drafts", tmp_path / "spool")
    keys = lakefs_server.credentials
    settings = {
        "TIDE_SERVICE": "command",
        "TIDE_LAKEFS_ENDPOINT": lakefs_server.endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": keys.access_key,
        "TIDE_LAKEFS_SECRET_KEY": keys.secret_key,
        "TIDE_LAKEFS_BLOCKS": str(lakefs_server.blocks),
        "TIDE_SPOOL": str(tmp_path / "spool"),
        "TIDE_HOME": str(tmp_path / "home"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    arguments = ["erase", "--conversation", f"{SEED:08x}", "--hashed", "--home", str(tmp_path / "home")]
    try:
        planned = CliRunner().invoke(cli.app, [*arguments, "--dry-run"])
        assert (planned.exit_code, "would be erased: 1 requests" in planned.output) == (0, True), planned.output
        done = CliRunner().invoke(cli.app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["erasures"][0]["drafts"] == [DRAFT]
        assert leaks(blobs(lakefs_server, "command-states")) == []
    finally:
        wiring.settings.cache_clear()
