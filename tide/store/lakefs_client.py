"""How lakeFS is called: the SDK's client with our timeouts, retries, paging and streamed reads, presigned or not.

Owns the transport. Knows nothing of the store port's promises.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import urllib3
from lakefs.client import Client
from lakefs.exceptions import handle_http_error
from typing_extensions import override

from tide.errors import StoreError
from tide.store.lakefs_errors import Where, refuse_block_store_errors, retrying, vendor_errors

T = TypeVar("T")

PAGE = 1000
"""The most that lakeFS lists at once."""
CONNECT_S, READ_S = 5.0, 120.0
TIMEOUT = {"_request_timeout": (CONNECT_S, READ_S)}


class LakefsClient:
    """Calls of the SDK that are retried while they fail transiently, and raise our errors.

    Args:
        endpoint: ``http://host:port``.
        access_key, secret_key: a user's keys.
        attempts: how often a transient failure is tried in all.
        sleep: waits between attempts.
    """

    def __init__(
        self,
        endpoint: str,
        access_key: str,
        secret_key: str,
        attempts: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = Client(host=endpoint, username=access_key, password=secret_key)
        self.api = self._client.sdk_client
        self._attempts, self._sleep = attempts, sleep
        self.http: urllib3.PoolManager = self.api.objects_api.api_client.rest_client.pool_manager
        # One place retries (ours, with jitter, where it may help): urllib3's own three would multiply it.
        self.http.connection_pool_kw["retries"] = urllib3.Retry(total=None, connect=0, read=0, redirect=5, other=0)
        self.http.connection_pool_kw["timeout"] = urllib3.Timeout(connect=CONNECT_S, read=READ_S)

    def call(self, where: Where, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of the SDK, retried while it fails transiently."""
        return self.retry(where, lambda: function(*args, **kwargs, **TIMEOUT))

    def retry(self, where: Where, operation: Callable[[], T]) -> T:
        """Any operation on this client, retried while it fails transiently."""

        def translated() -> T:
            with vendor_errors(where):
                return operation()

        return retrying(self._attempts, self._sleep)(translated)

    def pages(self, where: Where, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Items of a listing call, however many pages; each page is retried by itself."""
        after, more = "", True
        while more:
            page = self.call(where, function, *args, after=after, amount=PAGE, **kwargs)
            yield from page.results
            after, more = page.pagination.next_offset, page.pagination.has_more

    @property
    def presigns(self) -> bool:
        """Whether the block store signs addresses, so that bytes need not pass through the server."""
        return bool(self._client.storage_config.pre_sign_support)

    @property
    def blockstore_type(self) -> str:
        """``s3``, ``gs``, ``azure`` or ``local``."""
        return str(self._client.storage_config.blockstore_type)

    def request_of(self, method: str, where: Where, ref: str, **query: str) -> tuple[str, dict[str, str]]:
        """Address and signed-in headers of an object: the SDK's own calls hold whole bodies in memory.

        Args:
            ref: ``branches/NAME`` to write to, ``refs/NAME`` to read from.
        """
        api = self.api.objects_api.api_client
        kind, _, name = ref.partition("/")
        resource = f"/repositories/{quote(where.repository)}/{kind}/{quote(name, safe='')}/objects"
        headers = dict(api.default_headers)
        api.update_params_for_auth(headers, None, ["basic_auth"], resource, method, None)
        return f"{api.configuration.host}{resource}?{urlencode({'path': where.path, **query})}", headers

    def get(self, where: Where, start: int = 0) -> urllib3.BaseHTTPResponse:
        """A response to stream an object from, beginning at a byte of it.

        Where the block store signs addresses, the bytes come from there, by an address that was made for this call.
        """
        url, headers = self.request_of("GET", where, f"refs/{where.ref}", presign=str(self.presigns).lower())
        part = {"Range": f"bytes={start}-"} if start else {}
        response = self.http.request("GET", url, headers=headers | part, preload_content=False, redirect=False)
        if response.status != HTTPStatus.FOUND:
            with closing(response) if response.status >= 300 else nullcontext():
                handle_http_error(response)
            return response
        address = response.headers["Location"]
        response.drain_conn()
        # Without our headers: they have the keys of lakeFS.
        response = self.http.request("GET", address, headers=part, preload_content=False, redirect=False)
        if response.status >= 300:
            with closing(response):
                refuse_block_store_errors(response.status, response.data, where)
        return response

    def stream(self, where: Where) -> BodyStream:
        """An object as a stream that outlives its connection and its address."""
        return BodyStream(self, where)


class BodyStream(io.RawIOBase):
    """The bytes of one object. What breaks half way is opened again where it broke, by a new address.

    Raises, when made: NotFound, Gone, and what else an object cannot be read for.
    """

    def __init__(self, lakefs: LakefsClient, where: Where) -> None:
        self._lakefs, self._where, self._position = lakefs, where, 0
        # First of all: what cannot be opened is closed all the same, by the interpreter.
        self._response: urllib3.BaseHTTPResponse | None = None
        self._response = first = lakefs.retry(where, lambda: lakefs.get(where))
        self._etag = first.headers.get("ETag")

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        data = self._lakefs.retry(self._where, lambda: self._next(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    @override
    def close(self) -> None:
        self._drop()
        super().close()

    def _next(self, size: int) -> bytes:
        response = self._response = self._response or self._again()
        try:
            data = response.read(size)
        except BaseException:
            self._drop()
            raise
        self._position += len(data)
        return data

    def _again(self) -> urllib3.BaseHTTPResponse:
        response = self._lakefs.get(self._where, self._position)
        same = response.headers.get("ETag") == self._etag
        begins = response.headers.get("Content-Range", "bytes 0-").startswith(f"bytes {self._position}-")
        if same and begins:
            return response
        response.close()
        why = (
            "cannot be read on from where it broke" if same else "was rewritten while it was read: read it at a commit"
        )
        raise StoreError(f"{self._where}: the object {why}")

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
        self._response = None
