"""Fixtures shared by all tests: the servers that a session starts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from infra import ports
from infra.files import write_private
from infra.lakefs.server import Credentials, LakefsServer
from infra.versitygw.server import S3Gateway
from tests.support import compose
from tests.support import postgres as postgresql

ENCRYPTION_KEY = "0123456789abcdef" * 4


@dataclass(frozen=True)
class TeamLakefs:
    """lakeFS with the settings of infra/compose, on servers of this machine."""

    server: LakefsServer
    gateway: S3Gateway
    postgres_port: int | None
    """None where PostgreSQL is not installed: keys are in a folder then."""


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
def team_lakefs(tmp_path_factory: pytest.TempPathFactory, s3_gateway: S3Gateway) -> Iterator[TeamLakefs]:
    """lakeFS on S3, and on PostgreSQL where it is installed, by the environment that the compose file gives it."""
    home = tmp_path_factory.mktemp("team")
    access, secret = s3_gateway.keys
    keys = Credentials(access_key="AKIATIDETEAM", secret_key="team-secret", encryption_key=ENCRYPTION_KEY)
    write_private(home / "lakefs" / "credentials.json", keys.to_json())
    secrets = {
        "POSTGRES_PASSWORD": "0a1b2c3d4e5f",
        "S3_ACCESS_KEY": access,
        "S3_SECRET_KEY": secret,
        "S3_PUBLIC_ENDPOINT": s3_gateway.endpoint,
        "LAKEFS_ENCRYPT_KEY": keys.encryption_key,
        "TIDE_LAKEFS_ACCESS_KEY": keys.access_key,
        "TIDE_LAKEFS_SECRET_KEY": keys.secret_key,
    }
    addresses = {"versitygw:7070": s3_gateway.endpoint.removeprefix("http://")}
    with ExitStack() as stack:
        port = None
        if programs := postgresql.programs():
            names = compose.services()["postgres"]["environment"]
            user, database = names["POSTGRES_USER"], names["POSTGRES_DB"]
            password = secrets["POSTGRES_PASSWORD"]
            running = postgresql.postgres(programs, home, user=user, password=password, database=database)
            port = stack.enter_context(running)
            addresses["postgres:5432"] = f"{ports.HOST}:{port}"
        settings = compose.environment("lakefs", secrets, addresses)
        if port is None:
            settings = {name: value for name, value in settings.items() if not name.startswith("LAKEFS_DATABASE_")}
        server = stack.enter_context(LakefsServer(home, port=ports.free_port(), settings=settings))
        yield TeamLakefs(server, s3_gateway, port)
