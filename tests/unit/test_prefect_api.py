"""The calls of Prefect's API: what is wrong with an answer is said, by an error of ours."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tide import prefect_api
from tide.errors import ConfigError, NotThere, ServiceError
from tide.prefect_api import PrefectApi


def answering(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> PrefectApi:
    def request(method: str, url: str, **_: Any) -> httpx.Response:
        answer.request = httpx.Request(method, url)
        return answer

    monkeypatch.setattr(prefect_api.httpx, "request", request)
    return PrefectApi("http://p/api")


def test_a_page_that_is_no_api_is_told_by_its_address_and_how_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    api = answering(monkeypatch, httpx.Response(200, text="<!doctype html><title>Grafana</title>"))
    with pytest.raises(ServiceError, match=r"http://p/api/flows answered with a page .* with /api\? .*<!doctype html>"):
        api.call("GET", "flows")


def test_an_address_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError, match="Prefect at http://p:port/api does not answer: Invalid port"):
        PrefectApi("http://p:port/api").call("GET", "flows")


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        (404, NotThere, "has no flows"),
        (401, ConfigError, "PREFECT_API_AUTH_STRING=NAME:PASSWORD"),
        (422, ServiceError, "refused GET flows: 422 of old"),
    ],
)
def test_what_the_server_refuses_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        answering(monkeypatch, httpx.Response(code, text="of old")).call("GET", "flows")


def test_what_is_said_of_a_secret_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError) as caught:
        answering(monkeypatch, httpx.Response(422, text="hunter2")).call("POST", "flows", {"a": 1}, secret=True)
    assert "hunter2" not in str(caught.value)


def test_an_answer_without_content_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answering(monkeypatch, httpx.Response(204)).call("DELETE", "flows") is None
