"""Fixtures shared by all tests: the servers that a session starts once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from infra import ports
from infra.lakefs.server import LakefsServer
from infra.versitygw.server import S3Gateway
from tests.support import team_lakefs as team

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("tide", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tide")


@pytest.fixture(scope="session")
def lakefs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakefsServer]:
    """One real lakeFS server for the session, on a free loopback port, over an empty folder."""
    with LakefsServer(tmp_path_factory.mktemp("lakefs"), port=ports.free_port()) as server:
        yield server


@pytest.fixture(scope="session")
def s3_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Gateway]:
    """One S3 gateway for the session, with an empty bucket."""
    with S3Gateway(tmp_path_factory.mktemp("s3"), port=ports.free_port()) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def team_lakefs(tmp_path_factory: pytest.TempPathFactory, s3_gateway: S3Gateway) -> Iterator[team.TeamLakefs]:
    """lakeFS with the settings of infra/compose: on S3, and on PostgreSQL where it is installed."""
    with team.team_lakefs(tmp_path_factory.mktemp("team"), s3_gateway) as running:
        yield running
