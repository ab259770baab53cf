"""Deletion of bytes behind lakeFS: the one thing that lakeFS leaves to whoever keeps its block store.

Owns how a physical address becomes a file of a local block store or an object of an S3 bucket, and that nothing
outside the repository's own part of the store is touched. Knows nothing of refs or of what the bytes mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tide.errors import ConfigError, NotFound, StoreError, StoreUnauthorized, StoreUnavailable
from tide.files import sync_folder

_UNVERSIONED = {"NotImplemented", "VersioningNotConfigured", "MethodNotAllowed"}
"""Answers of S3 gateways that keep no versions to the question whether they do."""
_KINDS = {401: StoreUnauthorized, 403: StoreUnauthorized, 404: NotFound}


@dataclass(frozen=True)
class BlockAccess:
    """How lakeFS's block store is reached from here. What is not set is not reachable.

    Args:
        folder: ``blockstore.local.path`` of a lakeFS server on this machine.
        s3_endpoint: ``http(s)://host:port`` of an S3-compatible store; empty: AWS's own.
        s3_access_key, s3_secret_key: empty: the usual AWS sources (profile, instance role).
    """

    folder: Path | None = None
    s3_endpoint: str = ""
    s3_access_key: str = ""
    s3_secret_key: str = field(default="", repr=False)
    s3_region: str = ""

    def require(self, namespace: str) -> None:
        """Check that bytes under a storage namespace can be deleted from here. Raises ConfigError, StoreError."""
        if namespace.startswith("local://"):
            _local_folder(self.folder, namespace)
        else:
            bucket, client = _s3_place(namespace)[0], _s3_client(self)
            with _s3_errors(f"bucket {bucket}"):
                client.head_bucket(Bucket=bucket)

    def erase(self, namespace: str, address: str) -> bool:
        """Delete the bytes at an address; True when there were any.

        Raises:
            ConfigError: not reachable from here.
            StoreError: the address is not under the namespace, or the store refused.
        """
        if namespace.startswith("local://"):
            return _erase_file(_local_file(_local_folder(self.folder, namespace), namespace, address))
        bucket, prefix = _s3_place(namespace)
        theirs, key = _s3_place(address)
        if theirs != bucket or not key.startswith(prefix.rstrip("/") + "/"):
            raise _foreign(namespace, address)
        client = _s3_client(self)
        with _s3_errors(address):
            return _erase_key(client, bucket, key)


def _foreign(namespace: str, address: str) -> StoreError:
    return StoreError(
        f"{address} is not under the repository's namespace {namespace}: it was imported, "
        "and whoever keeps it there has to delete it"
    )


# A folder on this machine


def _local_folder(blocks: Path | None, namespace: str) -> Path:
    """The repository's part of a local block store."""
    if blocks is None:
        raise ConfigError(
            f"the bytes of {namespace} lie with the lakeFS server: run this on its machine, "
            "with TIDE_LAKEFS_BLOCKS set to its blockstore.local.path"
        )
    folder = blocks / namespace.removeprefix("local://").strip("/")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"TIDE_LAKEFS_BLOCKS is {blocks}, and {folder} is no folder that can be written: "
            "set it to blockstore.local.path of the lakeFS server"
        )
    return folder


def _local_file(folder: Path, namespace: str, address: str) -> Path:
    # lakeFS puts its own path of the block store before the namespace: relative to its folder, or absolute.
    _, inside, key = address.rpartition(f"/{namespace.removeprefix('local://').strip('/')}/")
    file = (folder / key).resolve()
    if not address.startswith("local://") or not inside or folder.resolve() not in file.parents:
        raise _foreign(namespace, address)
    return file


def _erase_file(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{file} cannot be deleted: {error.strerror}; give this user the right to") from error
    sync_folder(file.parent)
    return True


# S3


def _s3_place(address: str) -> tuple[str, str]:
    """Bucket and key of ``s3://bucket/key``."""
    parts = urlsplit(address)
    if parts.scheme != "s3":
        raise ConfigError(
            f"{address}: bytes can be deleted from a local or an S3 block store; this one needs a tool of its own"
        )
    return parts.netloc, parts.path.lstrip("/")


def _s3_client(access: BlockAccess) -> Any:
    try:
        import boto3  # only where lakeFS keeps its blocks in S3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError("lakeFS keeps its blocks in S3: install boto3 (`pip install tide[s3]`)") from error
    return boto3.client(
        "s3",
        endpoint_url=access.s3_endpoint or None,
        aws_access_key_id=access.s3_access_key or None,
        aws_secret_access_key=access.s3_secret_key or None,
        region_name=access.s3_region or "us-east-1",
        config=Config(s3={"addressing_style": "path"} if access.s3_endpoint else {}, retries={"mode": "standard"}),
    )


@contextmanager
def _s3_errors(where: str) -> Iterator[None]:
    """Raise ours in place of botocore's."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = _KINDS.get(status, StoreUnavailable if status >= 500 or status == 429 else StoreError)
        raise kind(f"{where}: the block store refused: {error}; see TIDE_S3_ENDPOINT and its keys") from error
    except NoCredentialsError as error:
        raise ConfigError(f"{where}: no keys for the block store: set TIDE_S3_ACCESS_KEY and _SECRET_KEY") from error
    except BotoCoreError as error:
        raise StoreUnavailable(f"{where}: the block store does not answer: {error}; see TIDE_S3_ENDPOINT") from error


def _erase_key(client: Any, bucket: str, key: str) -> bool:
    """Delete an object, every version of it: in a versioned bucket a plain delete only hides it."""
    versions = list(_versions(client, bucket, key)) if _versioned(client, bucket) else []
    for version in versions:
        client.delete_object(Bucket=bucket, Key=key, VersionId=version)
    if versions:
        return True
    there = _exists(client, bucket, key)
    if there:
        client.delete_object(Bucket=bucket, Key=key)
    return there


def _versioned(client: Any, bucket: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        return "Status" in client.get_bucket_versioning(Bucket=bucket)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in _UNVERSIONED:
            return False
        raise


def _versions(client: Any, bucket: str, key: str) -> Iterator[str]:
    for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=key):
        for item in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
            if item["Key"] == key:
                yield str(item["VersionId"])


def _exists(client: Any, bucket: str, key: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
            return False
        raise
    return True
