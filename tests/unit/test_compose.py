"""The compose file: well formed, pinned, closed to the network, without a secret in it, and one with what is tested."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from infra.lakefs.build import LAKEFS
from infra.versitygw.build import VERSITYGW
from tests.support import compose

SERVICES = compose.services()
EXAMPLE = (compose.FOLDER / "env.example").read_text()
NAMES = re.findall(r"^([A-Z_0-9]+)=", EXAMPLE, re.M)


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned_to_one_version(name: str) -> None:
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+[\w.-]*", SERVICES[name]["image"])


def test_lakefs_and_gateway_are_the_versions_that_the_tests_run() -> None:
    assert SERVICES["lakefs"]["image"].endswith(f":{LAKEFS.version()}")
    assert SERVICES["versitygw"]["image"].endswith(f":v{VERSITYGW.version()}")


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    assert all(str(port).startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))
    assert "network_mode" not in SERVICES[name]


def test_what_holds_data_holds_it_in_named_volumes() -> None:
    volumes = set(yaml.safe_load((compose.FOLDER / "compose.yaml").read_text())["volumes"])
    used = {str(v).partition(":")[0] for s in SERVICES.values() for v in s.get("volumes", [])}
    assert used == volumes
    assert all(SERVICES[name]["volumes"] for name in ("postgres", "versitygw"))


def test_secrets_come_by_name_and_the_example_has_every_name_and_no_value() -> None:
    text = (compose.FOLDER / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) - {"S3_PUBLIC_ENDPOINT"} == set(NAMES)
    assert re.findall(r"^[A-Z_0-9]+=.+", EXAMPLE, re.M) == []
    for service in SERVICES.values():
        for name, value in service["environment"].items():
            if re.search(r"SECRET|PASSWORD|KEY_ID|ACCESS_KEY", name):
                assert str(value).startswith("${"), name


@pytest.mark.parametrize("name", NAMES)
def test_a_name_without_a_value_stops_compose(name: str) -> None:
    asked = f"${{{name}:?"
    assert any(asked in str(value) for service in SERVICES.values() for value in service["environment"].values())


def test_services_find_each_other_by_the_names_they_have() -> None:
    env: dict[str, Any] = SERVICES["lakefs"]["environment"]
    hosts = re.findall(r"(?:http://|@)([a-z]+):\d+", " ".join(map(str, env.values())))
    assert set(hosts) == set(SERVICES["lakefs"]["depends_on"])
