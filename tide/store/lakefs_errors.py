"""What lakeFS, its SDK and its block store answer, turned into our errors with repository, ref and path.

Owns the reading of status codes and messages of lakeFS 1.8x and of S3, and which of it is retried. Knows nothing of the
operations themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lakefs_sdk
import tenacity
import urllib3
from lakefs.exceptions import LakeFSException, ObjectExistsException, ServerException
from pydantic.v1 import ValidationError

from tide.errors import (
    AddressRefused,
    AlreadyExists,
    Conflict,
    Gone,
    HookRefused,
    NotFound,
    NothingToCommit,
    ProtectedBranch,
    StoreError,
    StoreUnauthorized,
    StoreUnavailable,
)

VENDOR_ERRORS = (
    lakefs_sdk.ApiException,
    LakeFSException,
    ValidationError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)


@dataclass(frozen=True)
class Where:
    """What an operation was about; every error carries it."""

    action: str
    repository: str = ""
    ref: str = ""
    path: str = ""

    def __str__(self) -> str:
        parts = (("repository", self.repository), ("ref", self.ref), ("path", self.path))
        return ": ".join([self.action, ", ".join(f"{name} {value}" for name, value in parts if value)]).rstrip(": ")


@contextmanager
def vendor_errors(where: Where) -> Iterator[None]:
    """Raise ours in place of VENDOR_ERRORS."""
    try:
        yield
    except VENDOR_ERRORS as error:
        raise translate(error, where) from error


def translate(error: BaseException, where: Where) -> StoreError:
    """Our error for one of VENDOR_ERRORS."""
    if isinstance(error, ObjectExistsException):
        return AlreadyExists(f"{where}: an object of this name exists")
    if isinstance(error, ValidationError):
        return StoreError(f"{where}: the SDK refuses it: {' '.join(str(error).split())}")
    status, message = _status_and_message(error)
    if status is None:
        return StoreUnavailable(f"{where}: no answer from lakeFS ({message}); is it running, is the address right?")
    kind = _kind(status, message, where)
    return kind(f"{where}: {message.strip() or 'no message'} (HTTP {status}){_next_step(kind, message)}")


def refuse_block_store_errors(status: int, body: bytes, where: Where) -> None:
    """Raise ours when a presigned request failed: what the block store says, in XML, and never the address itself.

    Raises:
        AddressRefused: it had expired, or was signed with keys that the store does not take.
        Gone: it has no such bytes.
        StoreUnavailable: another try may succeed.
        StoreError: anything else.
    """
    if status < 300:
        return
    text = body[:4096].decode(errors="replace")
    code, message = (_element(text, name) for name in ("Code", "Message"))
    said = f"the block store said {' '.join(filter(None, (code, message))) or 'nothing more'} (HTTP {status})"
    if status == 403 or code == "ExpiredToken":
        next_step = "check lakeFS's keys for it, its pre_signed_expiry, and the clocks"
        raise AddressRefused(f"{where}: a presigned address was refused, {said}: {next_step}")
    if status == 404 and where.action != "put":
        raise Gone(f"{where}: its bytes were deleted, {said}; nothing brings them back")
    if status in (408, 429, 500, 502, 503, 504) or code == "RequestTimeout":
        raise StoreUnavailable(f"{where}: {said}")
    raise StoreError(f"{where}: {said}")


def retrying(attempts: int, sleep: Callable[[float], None]) -> tenacity.Retrying:
    """Retries, with jitter, of what raised one of our transient errors; anything else is raised at once."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential(multiplier=0.1, max=5.0) + tenacity.wait_random(0, 0.2),
        sleep=sleep,
        reraise=True,
    )


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.S)
    return found[1].strip() if found else ""


def _next_step(kind: type[StoreError], message: str) -> str:
    if kind is StoreUnauthorized:
        return "; check TIDE_LAKEFS_ACCESS_KEY and TIDE_LAKEFS_SECRET_KEY"
    if kind is NotFound and "repository" in message.lower():
        return "; `tide init` makes a service's repositories"
    return ""


def _status_and_message(error: BaseException) -> tuple[int | None, str]:
    if isinstance(error, ServerException):
        cause = error.__cause__
        message = error.body.get("message", "") if isinstance(error.body, dict) else ""
        if not message and isinstance(cause, lakefs_sdk.ApiException):
            message = _message(cause.body)
        return error.status_code, message or str(error.reason or "")
    if isinstance(error, lakefs_sdk.ApiException):
        # Status 0 is the SDK's word for a failed TLS handshake.
        return error.status or None, _message(error.body) or str(error.reason or "")
    if isinstance(error, urllib3.exceptions.MaxRetryError):
        # Its own words have the whole address: a presigned one is a key to the object.
        return None, str(error.reason)
    return None, str(error)


def _message(body: object) -> str:
    try:
        parsed = json.loads(body) if isinstance(body, str | bytes) else None
    except ValueError:
        return str(body)[:300]
    return str(parsed.get("message", "")) if isinstance(parsed, dict) else ""


def _kind(status: int, message: str, where: Where) -> type[StoreError]:
    text = message.lower()
    # "predicate failed" is how lakeFS's key-value side says that another write to the same branch was faster.
    if status in (429, 502, 503, 504) or (status == 500 and ("locked" in text or "predicate failed" in text)):
        return StoreUnavailable
    if status == 400:
        return NothingToCommit if "no changes" in text else Conflict if "dirty" in text else StoreError
    if status == 403:
        return ProtectedBranch if "protected" in text or "default branch" in text else StoreUnauthorized
    if "hook aborted" in text:
        return HookRefused
    if status == 412:
        return AlreadyExists if where.action == "put" else HookRefused
    known = {401: StoreUnauthorized, 404: NotFound, 409: Conflict, 410: Gone}
    return known.get(status, StoreError)
