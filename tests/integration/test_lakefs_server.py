"""The lakeFS server on one machine: keys, ports, starting, stopping, and what a person reads when it fails."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from infra import go_program, lakefs
from infra.lakefs.build import LAKEFS
from infra.lakefs.server import LakefsServer
from tide.errors import ConfigError, ServiceError, StoreUnauthorized, StoreUnavailable
from tide.store.lakefs import LakefsStore


def _store(server: LakefsServer, secret: str | None = None) -> LakefsStore:
    keys = server.credentials
    return LakefsStore(server.endpoint, keys.access_key, secret or keys.secret_key, attempts=2, sleep=lambda _: None)


def test_what_was_stored_and_the_keys_outlive_a_restart(tmp_path: Path) -> None:
    with LakefsServer(tmp_path) as server:
        keys, store = server.credentials, _store(server)
        store.create_repository("svc-states")
        store.put("svc-states", "main", "a", b"1")
        endpoint = server.endpoint
    with pytest.raises(StoreUnavailable, match=endpoint.removeprefix("http://").split(":")[0]):
        list(store.repositories())
    with LakefsServer(tmp_path) as server:
        assert server.credentials == keys
        assert _store(server).read("svc-states", "main", "a") == b"1"


def test_no_secret_is_readable_by_others_or_stands_in_configuration_or_log(tmp_path: Path) -> None:
    with LakefsServer(tmp_path) as server:
        keys = server.credentials
    path = tmp_path / "lakefs" / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = [
        Path(lakefs.__file__).with_name("lakefs.yaml"),
        *(tmp_path / "logs").iterdir(),
        *(tmp_path / "run").glob("*"),
    ]
    for file in written:
        for secret in (keys.secret_key, keys.encryption_key):
            assert secret not in file.read_text(errors="replace"), file


def test_wrong_keys_are_refused_at_once(lakefs_server: LakefsServer) -> None:
    store = _store(lakefs_server, secret="wrong")
    with pytest.raises(StoreUnauthorized, match="list repositories"):
        list(store.repositories())
    with pytest.raises(StoreUnauthorized, match="path a"):
        store.put("repo", "main", "a", b"1")
    with pytest.raises(StoreUnauthorized, match="path a"):
        store.read("repo", "main", "a")


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServiceError, match=f"port {port}"):
            LakefsServer(tmp_path, port=port).start()


def test_a_home_is_served_once_and_stopped_from_elsewhere(tmp_path: Path) -> None:
    first, second = LakefsServer(tmp_path), LakefsServer(tmp_path)
    first.start()
    try:
        assert second.endpoint == first.endpoint
        with pytest.raises(ServiceError, match="already served"):
            second.start()
    finally:
        second.stop()
    assert first.process is None
    with pytest.raises(ServiceError, match="start it first"):
        _ = first.endpoint
    first.stop()


def test_a_server_that_ends_while_starting_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho the disk is on fire\nexit 3\n")
    broken.chmod(0o755)
    server = LakefsServer(tmp_path / "home", binary=broken)
    with pytest.raises(ServiceError, match=r"(?s)code 3.*the disk is on fire"):
        server.start()
    assert server.process is None


def test_a_server_that_never_answers_is_ended_at_the_deadline(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    server = LakefsServer(tmp_path / "home", binary=silent, ready_s=0.5)
    with pytest.raises(ServiceError, match="not ready within"):
        server.start()
    assert server.process is None


def test_a_store_whose_keys_are_lost_is_not_given_new_ones(tmp_path: Path) -> None:
    (tmp_path / "lakefs" / "kv").mkdir(parents=True)
    with pytest.raises(ServiceError, match=r"credentials\.json"):
        LakefsServer(tmp_path).start()


def test_a_given_binary_that_is_none_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKEFS_BIN", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="LAKEFS_BIN"):
        LAKEFS.binary(tmp_path)


def test_a_built_binary_is_reused_by_the_digest_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAKEFS_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "lakefs").write_text("built before")
    (tmp_path / "cache" / "lakefs.digest").write_text(LAKEFS.digest())
    assert LAKEFS.binary(tmp_path / "cache") == tmp_path / "cache" / "lakefs"

    def no_toolchain(cache: Path, program: object, *, say: object) -> Path:
        raise ServiceError("asked for a toolchain")

    monkeypatch.setattr(go_program, "go_toolchain", no_toolchain)
    (tmp_path / "cache" / "lakefs.digest").write_text("of another module")
    with pytest.raises(ServiceError, match="asked for a toolchain"):
        LAKEFS.binary(tmp_path / "cache", say=lambda _: None)


def test_without_any_go_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(go_program.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(go_program.sys, "executable", "/bin/false")
    with pytest.raises(ServiceError, match=r"Install Go 1\.26 or newer, or set LAKEFS_BIN"):
        go_program.go_toolchain(tmp_path / "bin", LAKEFS, say=lambda _: None)


def test_a_go_that_is_too_old_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go1.21.3\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(go_program.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(go_program.sys, "executable", "/bin/false")
    with pytest.raises(ServiceError, match="there is no Go"):
        go_program.go_toolchain(tmp_path / "bin", LAKEFS, say=lambda _: None)


def test_the_version_is_the_one_the_module_requires(lakefs_server: LakefsServer) -> None:
    assert LAKEFS.version() == "1.84.0"
    address = json.loads((lakefs_server.folder / "address.json").read_text())
    assert lakefs_server.endpoint.endswith(f":{address['port']}")
