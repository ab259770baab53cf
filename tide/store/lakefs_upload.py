"""How bytes get into lakeFS: straight into its block store where that signs addresses, else through the server.

Owns both routes and the renewal of addresses: one an object, asked for when it is used, another one for every further
try. A file is streamed with its length known, never held. Knows nothing of commits or of what the objects mean.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import lakefs_sdk
from lakefs.exceptions import handle_http_error

from tide.errors import AlreadyExists, NotFound
from tide.store.lakefs_client import TIMEOUT, LakefsClient
from tide.store.lakefs_errors import Where, refuse_block_store_errors

MOST_PRESIGNED = 5 << 30
"""Bytes that S3 takes in one PUT; what is larger goes through the server, which cuts it into parts."""
ANY = "*"
"""The value of If-None-Match that any existing object matches."""


class Uploader:
    """Writes objects through one client.

    Args:
        lakefs: retries, and knows whether the block store signs addresses.
    """

    def __init__(self, lakefs: LakefsClient) -> None:
        self._lakefs, self._api = lakefs, lakefs.api

    def put(self, where: Where, source: Path | bytes, *, if_absent: bool) -> int:
        """Write one object and return its size in bytes.

        Raises:
            AlreadyExists: with ``if_absent``, when there is an object of this name.
            AddressRefused: the block store refused every address that lakeFS signed.
        """
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        condition = ANY if if_absent else None
        if if_absent:
            self._refuse_existing(where)
        if size <= MOST_PRESIGNED and self._lakefs.retry(where, lambda: self._lakefs.presigns):
            self._put_presigned(where, source, condition)
        else:
            self._lakefs.retry(where, lambda: self._post(where, source, condition))
        return size

    def _refuse_existing(self, where: Where) -> None:
        # Before a byte is sent: the condition itself is only looked at when they all are there.
        with contextlib.suppress(NotFound):
            self._stat(where)
            raise AlreadyExists(f"{where}: an object of this name exists, and is not to be rewritten")

    def _stat(self, where: Where) -> Any:
        return self._lakefs.call(where, self._api.objects_api.stat_object, where.repository, where.ref, where.path)

    def _put_presigned(self, where: Where, source: Path | bytes, condition: str | None) -> None:
        staged = self._lakefs.retry(where, lambda: self._stage(where, source))
        target = (where.repository, where.ref, where.path)
        try:
            self._lakefs.call(
                where, self._api.staging_api.link_physical_address, *target, staged, if_none_match=condition
            )
        except AlreadyExists:
            # Ours, when the answer of an earlier try was lost.
            if self._stat(where).physical_address != staged.staging.physical_address:
                raise

    def _stage(self, where: Where, source: Path | bytes) -> Any:
        """Send the bytes to an address of their own; nothing is seen of them until they are linked."""
        target = (where.repository, where.ref, where.path)
        staging = self._api.staging_api.get_physical_address(*target, presign=True, **TIMEOUT)
        headers = {"x-ms-blob-type": "BlockBlob"} if self._lakefs.blockstore_type == "azure" else {}
        with _opened(source) as (data, size):
            headers["Content-Length"] = str(size)
            response = self._lakefs.http.request(
                "PUT", staging.presigned_url, body=data, headers=headers, redirect=False
            )
        refuse_block_store_errors(response.status, response.data, where)
        return lakefs_sdk.StagingMetadata(staging=staging, checksum=_checksum(response.headers), size_bytes=size)

    def _post(self, where: Where, source: Path | bytes, condition: str | None) -> None:
        """Send the bytes through the server. The SDK's own call copies them to memory or a temporary file first."""
        url, headers = self._lakefs.request_of("POST", where, f"branches/{where.ref}")
        if condition:
            headers["If-None-Match"] = condition
        with _opened(source) as (data, size):
            headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
            handle_http_error(self._lakefs.http.request("POST", url, body=data, headers=headers))


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[BinaryIO, int]]:
    if isinstance(source, bytes):
        yield io.BytesIO(source), len(source)
        return
    with source.open("rb") as file:
        yield file, os.fstat(file.fileno()).st_size


def _checksum(headers: Mapping[str, str]) -> str:
    """What lakeFS keeps as the object's checksum: MD5 in hexadecimal where the store names it, else its ETag."""
    if md5 := headers.get("Content-MD5"):
        return base64.b64decode(md5).hex()
    return headers.get("ETag", "").strip(' "')
