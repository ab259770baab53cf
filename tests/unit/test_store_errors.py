"""What a person reads when the store refuses: what, where, and the next step; never a presigned address."""

from __future__ import annotations

import lakefs_sdk
import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from tide.errors import AddressRefused, Gone, NotFound, StoreError, StoreUnauthorized, StoreUnavailable
from tide.store.lakefs_errors import Where, refuse_block_store_errors, translate

READ = Where("read", "svc-states", "main", "shards/a")
PUT = Where("put", "svc-states", "main", "shards/a")
ADDRESS = "/bucket/data/a?X-Amz-Signature=abc123"


def _said(code: str, message: str = "in its own words") -> bytes:
    return f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


@pytest.mark.parametrize(
    ("where", "status", "body", "error"),
    [
        (PUT, 403, _said("AccessDenied", "Request has expired"), AddressRefused),
        (READ, 403, _said("SignatureDoesNotMatch"), AddressRefused),
        (PUT, 400, _said("ExpiredToken"), AddressRefused),
        (READ, 404, _said("NoSuchKey"), Gone),
        (PUT, 404, _said("NoSuchBucket"), StoreError),
        (PUT, 400, _said("RequestTimeout"), StoreUnavailable),
        (PUT, 503, _said("SlowDown"), StoreUnavailable),
        (READ, 500, b"", StoreUnavailable),
        (READ, 502, b"<html>Bad gateway</html>", StoreUnavailable),
        (PUT, 400, _said("EntityTooLarge"), StoreError),
        (PUT, 307, b"", StoreError),
    ],
)
def test_an_answer_of_the_block_store_is_one_of_ours(
    where: Where, status: int, body: bytes, error: type[StoreError]
) -> None:
    with pytest.raises(error, match=rf"repository svc-states, ref main, path shards/a.*HTTP {status}") as caught:
        refuse_block_store_errors(status, body, where)
    assert type(caught.value) is error


def test_a_refused_address_says_why_and_what_to_check() -> None:
    with pytest.raises(AddressRefused, match=r"AccessDenied Request has expired.*check lakeFS's keys .*clocks"):
        refuse_block_store_errors(403, _said("AccessDenied", "Request has expired"), PUT)


@given(st.binary(max_size=5000), st.integers(200, 299))
def test_success_is_no_error_whatever_the_body_says(body: bytes, status: int) -> None:
    refuse_block_store_errors(status, body, PUT)


@given(st.binary(max_size=5000), st.integers(300, 599))
def test_any_failure_is_a_store_error_whatever_its_body(body: bytes, status: int) -> None:
    with pytest.raises(StoreError, match=f"HTTP {status}"):
        refuse_block_store_errors(status, body, PUT)


def test_refused_keys_name_the_settings_that_hold_them() -> None:
    error = translate(lakefs_sdk.ApiException(status=401, reason="Unauthorized"), Where("list repositories"))
    assert isinstance(error, StoreUnauthorized)
    assert "check TIDE_LAKEFS_ACCESS_KEY and TIDE_LAKEFS_SECRET_KEY" in str(error)


def test_a_missing_repository_is_told_from_a_missing_object_by_what_to_do() -> None:
    def missing(what: str) -> str:
        answer = lakefs_sdk.ApiException(status=404, reason="Not Found")
        answer.body = f'{{"message": "{what} not found"}}'
        error = translate(answer, READ)
        assert isinstance(error, NotFound)
        return str(error)

    assert "`tide init`" in missing("repository")
    assert "`tide init`" not in missing("path")


def test_a_server_that_is_not_there_is_named_and_an_address_is_not() -> None:
    pool = urllib3.HTTPConnectionPool("127.0.0.1", 9)
    reason = urllib3.exceptions.NewConnectionError(pool._new_conn(), "Connection refused to 127.0.0.1:9")
    error = translate(urllib3.exceptions.MaxRetryError(pool, ADDRESS, reason), PUT)
    assert isinstance(error, StoreUnavailable)
    assert "127.0.0.1" in str(error)
    assert "X-Amz" not in str(error)
