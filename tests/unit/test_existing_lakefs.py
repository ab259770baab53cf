"""A lakeFS that somebody else runs: what is checked before a stack is started on it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra import local, ports
from infra.lakefs.existing import LakefsAccess, existing_lakefs
from infra.prepared import Prepared
from infra.sglang import SglangOptions
from infra.start import Start
from tide.errors import ConfigError, StoreUnauthorized, StoreUnavailable, TideError

STORAGE = {
    "blockstore_type": "s3",
    "blockstore_namespace_ValidityRegex": "^s3://",
    "blockstore_namespace_example": "s3://example-bucket/",
}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = f"Basic {base64.b64encode(b'key:secret').decode()}"
            status = 200 if self.headers.get("Authorization") == known else 401
            body = json.dumps({"storage_config": STORAGE} if status == 200 else {"message": "who"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    monkeypatch.chdir(tmp_path)  # away from any .env
    monkeypatch.setenv("TIDE_LAKEFS_ACCESS_KEY", "key")
    monkeypatch.setenv("TIDE_LAKEFS_SECRET_KEY", "secret")
    monkeypatch.setenv("TIDE_LAKEFS_NAMESPACE", "s3://bucket/prefix/")
    server = ThreadingHTTPServer((ports.HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://{ports.HOST}:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_keys_and_namespace_come_from_the_environment_and_the_secret_is_not_shown(endpoint: str) -> None:
    found = existing_lakefs(f"{endpoint}/")
    assert found == LakefsAccess(endpoint, "key", "secret", "s3://bucket/prefix/")
    assert "'secret'" not in repr(found)


@pytest.mark.parametrize(
    ("variable", "value", "error", "says"),
    [
        ("TIDE_LAKEFS_SECRET_KEY", "wrong", StoreUnauthorized, "refuses the keys .*check TIDE_LAKEFS_ACCESS_KEY"),
        ("TIDE_LAKEFS_SECRET_KEY", "", ConfigError, "no keys .*set TIDE_LAKEFS_ACCESS_KEY"),
        ("TIDE_LAKEFS_NAMESPACE", "local://", ConfigError, r"keeps its bytes in s3: set it to .*s3://example-bucket/"),
        ("TIDE_LAKEFS_NAMESPACE", "s3://bucket", ConfigError, "with a / at the end"),
    ],
)
def test_what_is_wrong_is_named_with_the_next_step(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: type[TideError], says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(error, match=says):
        existing_lakefs(endpoint)


def test_a_server_that_is_not_there_is_named(endpoint: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"no lakeFS answers at http://127\.0\.0\.1:\d+ .*is it running"):
        existing_lakefs(f"http://{ports.HOST}:{ports.free_port()}")
    with pytest.raises(ConfigError, match="expected http://host:port"):
        existing_lakefs("127.0.0.1:8000")


def test_a_stack_on_it_is_told_its_address_keys_and_namespace(endpoint: str, tmp_path: Path) -> None:
    said: list[str] = []
    start = Start(tmp_path, local.Wanted(lakefs=endpoint), said.append, foreground=False)
    prepared = Prepared(model=tmp_path, draft=tmp_path, bundle=tmp_path)
    env = start._settings(start._lakefs()(), prepared, SglangOptions(model=tmp_path, port=1, draft=tmp_path))
    assert {name: value for name, value in env.items() if "LAKEFS" in name} == {
        "TIDE_LAKEFS_ENDPOINT": endpoint,
        "TIDE_LAKEFS_ACCESS_KEY": "key",
        "TIDE_LAKEFS_SECRET_KEY": "secret",
        "TIDE_LAKEFS_NAMESPACE": "s3://bucket/prefix/",
    }
    assert said == [f"lakeFS: {endpoint}, not started here"]


def test_nothing_is_started_beside_a_lakefs_that_cannot_be_used(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDE_LAKEFS_SECRET_KEY", "wrong")
    with pytest.raises(StoreUnauthorized):
        local.up(tmp_path / "home", local.Wanted(lakefs=endpoint), report=lambda _: None)
    assert list((tmp_path / "home" / "run").glob("*.process.json")) == []
    assert not (tmp_path / "home" / "logs").exists()
