"""How lakeFS is called: the SDK's client with our timeouts, retries, paging and streamed reads.

Owns the transport. Knows nothing of the store port's promises.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import urllib3
from lakefs.client import Client
from lakefs.exceptions import handle_http_error
from lakefs.object import WriteableObject
from typing_extensions import override

from tide.store.lakefs_errors import Where, retrying, vendor_errors

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
        self._http: urllib3.PoolManager = self.api.objects_api.api_client.rest_client.pool_manager
        # One place retries (ours, with jitter, where it may help): urllib3's own three would multiply it.
        self._http.connection_pool_kw["retries"] = urllib3.Retry(total=None, connect=0, read=0, redirect=5, other=0)
        self._http.connection_pool_kw["timeout"] = urllib3.Timeout(connect=CONNECT_S, read=READ_S)

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

    def get(self, repository: str, ref: str, path: str) -> urllib3.BaseHTTPResponse:
        """A response to stream from: the SDK's own calls read the whole body into memory."""
        api = self.api.objects_api.api_client
        resource = f"/repositories/{quote(repository)}/refs/{quote(ref, safe='')}/objects"
        headers = dict(api.default_headers)
        api.update_params_for_auth(headers, None, ["basic_auth"], resource, "GET", None)
        query = {"path": path, "presign": str(self._client.storage_config.pre_sign_support).lower()}
        url = f"{api.configuration.host}{resource}?{urlencode(query)}"
        response = self._http.request("GET", url, headers=headers, preload_content=False)
        with closing(response) if response.status >= 300 else nullcontext():
            handle_http_error(response)
        return response

    def object(self, repository: str, branch: str, path: str) -> WriteableObject:
        """The SDK's object, to write to."""
        return WriteableObject(repository, branch, path, client=self._client)


class BodyStream(io.RawIOBase):
    """The body of a response; what breaks half way is one of our errors."""

    def __init__(self, response: urllib3.BaseHTTPResponse, where: Where) -> None:
        self._response, self._where = response, where

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        with vendor_errors(self._where):
            data = self._response.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
