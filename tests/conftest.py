"""Fixtures shared by all tests: the servers that a session starts once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra import ports
from infra.lakefs.server import LakefsServer


@pytest.fixture(scope="session")
def lakefs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakefsServer]:
    """One real lakeFS server for the session, on a free loopback port, over an empty folder."""
    with LakefsServer(tmp_path_factory.mktemp("lakefs"), port=ports.free_port()) as server:
        yield server
