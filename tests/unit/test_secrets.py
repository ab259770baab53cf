"""A secret is used and never shown: not by settings, their errors, the command's output, nor by Prefect's blocks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from infra import prefect, prefect_access
from infra.secret_blocks import block_name, push
from tide import prefect_api, wiring
from tide.config import Settings
from tide.errors import ConfigError, NotThere, ServiceError
from tide.prefect_api import PrefectApi
from tide.sglang_plugin.settings import PluginSettings

SENTINEL = "s3ntinel"
SECRETS = {
    "TIDE_ADMIN_KEY": f"{SENTINEL}-admin",
    "TIDE_LAKEFS_ACCESS_KEY": f"{SENTINEL}-access",
    "TIDE_LAKEFS_SECRET_KEY": f"{SENTINEL}-lakefs",
    "TIDE_S3_ACCESS_KEY": f"{SENTINEL}-s3-access",
    "TIDE_S3_SECRET_KEY": f"{SENTINEL}-s3",
    "TIDE_HASH_KEY": f"{SENTINEL}-hash",
    "TIDE_OPENLINEAGE_API_KEY": f"{SENTINEL}-lineage",
}
PASSWORD = "prefect:" + "a-long-password"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return Settings()


def test_every_secret_setting_is_in_this_test() -> None:
    known = {f"TIDE_{n.upper()}" for n, field in Settings.model_fields.items() if field.annotation is SecretStr}
    assert known == set(SECRETS)
    suspicious = {n for n in Settings.model_fields if n.endswith(("_key", "_secret", "_password", "_token"))}
    assert {f"TIDE_{n.upper()}" for n in suspicious} == known, "a setting named so is a SecretStr"


def test_settings_never_show_a_secret(config: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logging.getLogger("test").info("%s %r %s", config, config, config.model_dump())
    shown = [repr(config), str(config), config.model_dump_json(), caplog.text, repr(config.__dict__)]
    assert not any(SENTINEL in text for text in shown)
    assert wiring.secrets(config) == SECRETS
    assert wiring.hash_key(config) == SECRETS["TIDE_HASH_KEY"].encode()


def test_the_plugin_shows_none_either() -> None:
    settings = PluginSettings.from_environment({"TIDE_HASH_KEY": SECRETS["TIDE_HASH_KEY"]})
    assert SENTINEL not in f"{settings!r} {settings.model_dump()}"
    assert settings.key() == SECRETS["TIDE_HASH_KEY"].encode()
    with pytest.raises(ConfigError) as refused:
        PluginSettings.from_environment({**SECRETS, "TIDE_MIN_TOKENS": "9", "TIDE_MAX_TOKENS": "8"})
    assert SENTINEL not in str(refused.value)


def test_wrong_settings_are_one_error_that_names_the_variable_and_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_SERVICE", f"{SENTINEL} Not A Name")
    with pytest.raises(ValidationError) as vendor:
        Settings()
    assert SENTINEL not in str(vendor.value)
    wiring.settings.cache_clear()
    with pytest.raises(ConfigError, match="TIDE_SERVICE") as refused:
        wiring.settings()
    assert SENTINEL not in str(refused.value)


COMMANDS: list[list[str]] = [
    ["status"],
    ["status", "--json"],
    ["doctor"],
    ["doctor", "--json"],
    ["serving"],
    ["history"],
    ["reconcile"],
    ["rollback"],
    ["parts"],
    ["--help"],
    ["secrets", "push", "--pool", "cpu"],
    ["rollout", "../../etc"],
]
DRIVER = """
import json, sys, time
time.sleep = lambda seconds: None  # what answers nobody is asked again, but not waited for
from tide import cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["tide", *arguments]
    print("##", *arguments, flush=True)
    try:
        cli.main()
    except SystemExit as ended:
        print("exit", ended.code, flush=True)
    except BaseException as error:
        import traceback
        traceback.print_exc()
"""


def test_no_command_shows_a_secret_whatever_goes_wrong(tmp_path: Path) -> None:
    """Nothing answers at these addresses: every command fails in its own way, and says so without a key."""
    dead = "127.0.0.1:9"
    env = (
        os.environ
        | SECRETS
        | {
            "TIDE_HOME": str(tmp_path),
            "TIDE_LAKEFS_ENDPOINT": f"http://{dead}",
            "TIDE_REPLICAS": f"r0=http://{dead}",
            "PREFECT_API_URL": f"http://{dead}/api",
            "PREFECT_API_AUTH_STRING": f"name:{SENTINEL}-prefect",
            "TIDE_PUBLIC_KEYS": "a" * 64,
            "TIDE_SIGNING_KEY_FILE": str(tmp_path / f"{SENTINEL[:3]}-missing"),
        }
    )
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(COMMANDS)], env=env, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert output.count("## ") == len(COMMANDS), output
    assert output.count("exit 1") >= 7, "they are meant to fail"
    assert "Traceback" not in output
    assert SENTINEL not in output
    logs = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SENTINEL in text for text in logs)


# Prefect: the API is closed off loopback, and blocks carry what workers need.


def test_a_prefect_that_others_can_reach_is_never_open() -> None:
    prefect_access.require_closed("127.0.0.1", {})
    prefect_access.require_closed("0.0.0.0", {"PREFECT_SERVER_API_AUTH_STRING": PASSWORD})
    with pytest.raises(ConfigError, match="PREFECT_SERVER_API_AUTH_STRING=NAME:PASSWORD"):
        prefect_access.require_closed("0.0.0.0", {})
    with pytest.raises(ConfigError, match=r"use 0\.0\.0\.0"):
        prefect_access.require_closed("10.1.2.3", {"PREFECT_SERVER_API_AUTH_STRING": PASSWORD})


@pytest.mark.parametrize("weak", ["prefect:short", "no-colon-at-all-in-it", ":a-long-password"])
def test_a_weak_password_is_refused_without_being_shown(weak: str) -> None:
    with pytest.raises(ConfigError, match="12 characters") as refused:
        prefect_access.require_closed("0.0.0.0", {"PREFECT_SERVER_API_AUTH_STRING": weak})
    assert weak not in str(refused.value)


def test_the_servers_database_is_the_servers_alone() -> None:
    """Its address has a password that no flow needs; other settings of Prefect in the shell stay out of both."""
    url = f"postgresql+asyncpg://tide:{SENTINEL}@db/prefect"
    shell = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url, "PREFECT_PROFILE": "cloud", "PATH": "/bin"}
    assert prefect_access.server_settings("127.0.0.1", shell) == {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url}
    assert SENTINEL not in str(prefect.environment(Path("home"), 4200, shell))


def test_up_refuses_an_open_prefect_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra import local

    for name in ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="PREFECT_SERVER_API_AUTH_STRING"):
        local.up(tmp_path, local.Wanted(prefect_host="0.0.0.0"), report=lambda _: None)
    assert {part.state for part in local.status(tmp_path)} == {"stopped"}


class Prefect:
    """The routes that `push` uses, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, template: dict[str, Any]) -> None:
        self.blocks: dict[str, Any] = {}
        self.template = template
        self.seen: list[tuple[str, str]] = []
        self.busy = 0
        """Calls that are answered 503 first."""
        monkeypatch.setattr(prefect_api.httpx, "request", self.answer)

    def answer(self, method: str, url: str, **options: Any) -> httpx.Response:
        path, body = url.removeprefix("http://p/api/"), options["json"]
        self.seen.append((method, path))
        if self.busy:
            self.busy -= 1
            return httpx.Response(503)
        known = path.removeprefix("block_types/slug/secret/block_documents/name/")
        found: Any = None
        match method, path:
            case "GET", "work_pools/cpu":
                found = {"base_job_template": self.template}
            case "PATCH", "work_pools/cpu":
                self.template = body["base_job_template"]
            case "GET", "block_types/slug/secret":
                found = {"id": "kind"}
            case "POST", "block_schemas/filter":
                found = [{"id": "schema"}]
            case "POST", "block_documents/":
                self.blocks[body["name"]] = body["data"]["value"]
            case "GET", _ if known in self.blocks:
                found = {"id": known}
            case "PATCH", _:
                self.blocks[path.removeprefix("block_documents/")] = body["data"]["value"]
            case _:
                return httpx.Response(404, json={})
        return httpx.Response(204) if found is None else httpx.Response(200, json=found)


def template() -> dict[str, Any]:
    return {"variables": {"properties": {"env": {"type": "object", "default": {"KEPT": "1"}}}}, "job_configuration": {}}


def test_a_secret_goes_into_a_block_and_the_pool_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Prefect(monkeypatch, template())
    for value in ("first", "second"):
        push(PrefectApi("http://p/api"), "svc", "cpu", {"TIDE_LAKEFS_SECRET_KEY": value})
        assert server.blocks == {"svc-lakefs-secret-key": value}
    environment = server.template["variables"]["properties"]["env"]["default"]
    assert environment == {"KEPT": "1", "TIDE_LAKEFS_SECRET_KEY": "{{ prefect.blocks.secret.svc-lakefs-secret-key }}"}


def test_a_busy_server_is_asked_again_and_one_that_stays_busy_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)
    server = Prefect(monkeypatch, template())
    server.busy = 3
    push(PrefectApi("http://p/api"), "svc", "cpu", {"TIDE_ADMIN_KEY": "x"})
    assert server.blocks == {"svc-admin-key": "x"}
    server.busy = 100
    with pytest.raises(ServiceError, match="refused GET work_pools/cpu: 503"):
        push(PrefectApi("http://p/api"), "svc", "cpu", {"TIDE_ADMIN_KEY": "x"})


def test_a_pool_that_is_not_there_or_has_no_template_keeps_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Prefect(monkeypatch, {})
    with pytest.raises(ServiceError, match="start its worker once"):
        push(PrefectApi("http://p/api"), "svc", "cpu", {"TIDE_ADMIN_KEY": "x"})
    with pytest.raises(NotThere, match="work_pools/gpu"):
        push(PrefectApi("http://p/api"), "svc", "gpu", {"TIDE_ADMIN_KEY": "x"})
    assert server.blocks == {}


def test_a_block_is_named_after_service_and_variable() -> None:
    assert block_name("smollm2", "TIDE_LAKEFS_SECRET_KEY") == "smollm2-lakefs-secret-key"
