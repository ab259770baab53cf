"""Deleting bytes from an S3 block store: botocore's own stubber answers, so that every call is one that S3 knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3", reason="boto3 (tide[s3]) is not installed: deletion from S3 was not verified")
from botocore.stub import Stubber  # noqa: E402

from tide.errors import ConfigError, StoreError, StoreUnauthorized, StoreUnavailable  # noqa: E402
from tide.store import lakefs_erase  # noqa: E402
from tide.store.lakefs_erase import BlockAccess  # noqa: E402

NAMESPACE, ADDRESS = "s3://bucket/tide/svc-states", "s3://bucket/tide/svc-states/data/abc/def"
KEY = "tide/svc-states/data/abc/def"
WHAT = {"Bucket": "bucket", "Key": KEY}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    client = boto3.client("s3", aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
    monkeypatch.setattr(lakefs_erase, "_s3_client", lambda access: client)
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def refuse(s3: Stubber, call: str, code: str, status: int, **expected: Any) -> None:
    s3.add_client_error(call, service_error_code=code, http_status_code=status, expected_params=expected)


def test_an_object_is_deleted_and_again_is_harmless(s3: Stubber) -> None:
    for there in (True, False):
        s3.add_response("get_bucket_versioning", {}, {"Bucket": "bucket"})
        if there:
            s3.add_response("head_object", {}, WHAT)
            s3.add_response("delete_object", {}, WHAT)
        else:
            refuse(s3, "head_object", "404", 404, **WHAT)
        assert BlockAccess().erase(NAMESPACE, ADDRESS) is there


def test_in_a_versioned_bucket_every_version_goes_and_no_neighbour(s3: Stubber) -> None:
    s3.add_response("get_bucket_versioning", {"Status": "Suspended"}, {"Bucket": "bucket"})
    listed = {
        "Versions": [{"Key": KEY, "VersionId": "1"}, {"Key": f"{KEY}-neighbour", "VersionId": "2"}],
        "DeleteMarkers": [{"Key": KEY, "VersionId": "3"}],
        "IsTruncated": False,
    }
    s3.add_response("list_object_versions", listed, {"Bucket": "bucket", "Prefix": KEY})
    for version in ("1", "3"):
        s3.add_response("delete_object", {}, {**WHAT, "VersionId": version})
    assert BlockAccess().erase(NAMESPACE, ADDRESS) is True


def test_a_gateway_that_knows_no_versions_is_taken_as_one_without(s3: Stubber) -> None:
    refuse(s3, "get_bucket_versioning", "NotImplemented", 501, Bucket="bucket")
    s3.add_response("head_object", {}, WHAT)
    s3.add_response("delete_object", {}, WHAT)
    assert BlockAccess().erase(NAMESPACE, ADDRESS) is True


@pytest.mark.parametrize(("status", "kind"), [(403, StoreUnauthorized), (503, StoreUnavailable), (400, StoreError)])
def test_a_refusal_is_ours_and_names_the_setting(s3: Stubber, status: int, kind: type[StoreError]) -> None:
    refuse(s3, "head_bucket", "Refused", status, Bucket="bucket")
    with pytest.raises(kind, match="TIDE_S3_ENDPOINT"):
        BlockAccess().require(NAMESPACE)


@pytest.mark.parametrize("address", ["s3://bucket/tide/svc-states-other/data/x", "s3://other/tide/svc-states/data/x"])
def test_an_object_outside_the_namespace_is_never_touched(s3: Stubber, address: str) -> None:
    with pytest.raises(StoreError, match="not under the repository's namespace"):
        BlockAccess().erase(NAMESPACE, address)


def test_another_block_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="a local or an S3 block store"):
        BlockAccess().require("gs://bucket/x")
