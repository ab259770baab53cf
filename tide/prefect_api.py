"""Calls of the Prefect API over HTTP: address, password, patience with a busy server, and what a refusal says.

Prefect's own client is not used: its import takes seconds that a command would make everybody wait, and freezes
settings before a stack's are known. Knows nothing of what is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import tenacity

from tide.errors import ConfigError, NotThere, ServiceError

_TIMEOUT_S = 30.0
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""SQLite behind a server is locked for moments under load; Prefect's own client asks again too."""
_ATTEMPTS = 10


Body = Mapping[str, Any] | list[Any] | None


@dataclass(frozen=True)
class PrefectApi:
    """A Prefect server's API."""

    url: str
    """``http://host:port/api``."""
    auth: str = field(default="", repr=False)
    """``NAME:PASSWORD``, as PREFECT_API_AUTH_STRING has it; empty: the server asks for none."""

    @classmethod
    def from_environment(cls) -> Self:
        """The server that PREFECT_API_URL names. Raises ConfigError when it does not."""
        url = os.environ.get("PREFECT_API_URL", "")
        if not url:
            raise ConfigError('PREFECT_API_URL is not set: name a home with --home, or eval "$(tide env)"')
        return cls(url, os.environ.get("PREFECT_API_AUTH_STRING", ""))

    def call(self, method: str, path: str, body: Body = None, *, secret: bool = False) -> Any:
        """One call, which must be safe to repeat; the answer's JSON, None when it has none.

        Args:
            secret: the body holds one: what the server says of it is not repeated.

        Raises:
            NotThere: no such thing there.
            ConfigError: the server wants a password, or another one.
            ServiceError: no answer, or a refusal, or what answers is no API; has what it said.
        """
        try:
            answer = self._send(method, path, body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(f"Prefect at {self.url} does not answer: {error}; see `tide status`") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotThere(f"Prefect at {self.url} has no {path}")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(f"Prefect at {self.url} wants a password: set PREFECT_API_AUTH_STRING=NAME:PASSWORD")
        if not answer.is_success:
            said = "" if secret else f" {answer.text[:500]}"
            raise ServiceError(f"Prefect at {self.url} refused {method} {path}: {answer.status_code}{said}")
        return self._content(answer)

    def _content(self, answer: httpx.Response) -> Any:
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise ServiceError(
                f"{answer.url} answered with a page that is no API's: is {self.url} the address with /api? "
                f"It begins {answer.text[:100]!r}"
            ) from error

    @tenacity.retry(
        retry=tenacity.retry_if_result(lambda answer: answer.status_code in _BUSY),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=3),
        retry_error_callback=lambda last: last.outcome.result() if last.outcome else None,
    )
    def _send(self, method: str, path: str, body: object) -> httpx.Response:
        name, _, password = self.auth.partition(":")
        return httpx.request(
            method,
            f"{self.url.rstrip('/')}/{path}",
            json=body,
            auth=(name, password) if self.auth else None,
            timeout=_TIMEOUT_S,
            trust_env=False,
        )
