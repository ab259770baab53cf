"""lakeFS as infra/compose runs it, on servers of this machine: the file's own settings, with loopback addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra import ports
from infra.files import write_private
from infra.lakefs.server import Credentials, LakefsServer
from infra.versitygw.server import S3Gateway
from tests.support import compose
from tests.support import postgres as postgresql

KEYS = Credentials(access_key="AKIATIDETEAM", secret_key="0a1b2c3d4e5f6a7b8c9d", encryption_key="0123456789abcdef" * 4)
POSTGRES_PASSWORD = "0a1b2c3d4e5f"


@dataclass(frozen=True)
class TeamLakefs:
    """A running server, and where its bytes are."""

    server: LakefsServer
    gateway: S3Gateway
    postgres_port: int | None
    """None where PostgreSQL is not installed: keys are in a folder then."""


@contextmanager
def team_lakefs(home: Path, gateway: S3Gateway) -> Iterator[TeamLakefs]:
    """lakeFS on S3, and on PostgreSQL where it is installed."""
    write_private(home / "lakefs" / "credentials.json", KEYS.to_json())
    access, secret = gateway.keys
    secrets = {
        "POSTGRES_PASSWORD": POSTGRES_PASSWORD,
        "S3_ACCESS_KEY": access,
        "S3_SECRET_KEY": secret,
        "S3_PUBLIC_ENDPOINT": gateway.endpoint,
        "LAKEFS_ENCRYPT_KEY": KEYS.encryption_key,
        "TIDE_LAKEFS_ACCESS_KEY": KEYS.access_key,
        "TIDE_LAKEFS_SECRET_KEY": KEYS.secret_key,
    }
    addresses = {"versitygw:7070": gateway.endpoint.removeprefix("http://")}
    with ExitStack() as stack:
        port = None
        if programs := postgresql.programs():
            names = compose.services()["postgres"]["environment"]
            user, database = names["POSTGRES_USER"], names["POSTGRES_DB"]
            running = postgresql.postgres(programs, home, user=user, password=POSTGRES_PASSWORD, database=database)
            port = stack.enter_context(running)
            addresses["postgres:5432"] = f"{ports.HOST}:{port}"
        settings = compose.environment("lakefs", secrets, addresses)
        if port is None:
            settings = {name: value for name, value in settings.items() if not name.startswith("LAKEFS_DATABASE_")}
        server = stack.enter_context(LakefsServer(home, port=ports.free_port(), settings=settings))
        yield TeamLakefs(server, gateway, port)
