"""Which answers of lakeFS are tried again, and which are not: a scripted server, spoken to over HTTP."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tide.errors import (
    Conflict,
    NotFound,
    NothingToCommit,
    StoreError,
    StoreUnauthorized,
    StoreUnavailable,
)
from tide.store.lakefs import LakefsStore

BASE = "/api/v1/repositories/repo"
MADE = {"committer": "tide", "meta_range_id": "", "parents": ["old"], "creation_date": 1}
OLD = {**MADE, "id": "old", "message": "before", "metadata": {}, "parents": []}
NEW = {**MADE, "id": "new", "message": "harvest", "metadata": {"k": "v"}}
NO_CHANGES = (400, {"message": "commit: no changes"})
Answer = tuple[int, object]


class Script:
    """Answers by request line, in order; the last one is repeated. ``seen`` counts requests by line."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.seen: dict[str, int] = defaultdict(int)

    def next(self, line: str) -> Answer:
        answers = self.answers[line]
        answer = answers[min(self.seen[line], len(answers) - 1)]
        self.seen[line] += 1
        return answer


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def store(script: Script, waits: list[float]) -> Iterator[LakefsStore]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = script.next(f"{self.command} {self.path.split('?')[0]}")
            if status == 0:
                self.connection.close()
                return
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET  # noqa: N815  # the name that http.server looks for

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield LakefsStore(f"http://127.0.0.1:{server.server_port}", "key", "secret", attempts=4, sleep=waits.append)
    server.shutdown()
    thread.join()
    server.server_close()


HEAD = f"GET {BASE}/commits/main"


@pytest.mark.parametrize(
    "answer",
    [
        (429, {"message": "too many tries"}),
        (500, {"message": "branch is currently locked"}),
        (500, {"message": "predicate failed"}),
        (503, {"message": "slow down"}),
        (0, None),
    ],
    ids=["throttled", "locked", "lost a race", "unavailable", "connection dropped"],
)
def test_a_transient_answer_is_tried_again_with_a_wait(
    store: LakefsStore, script: Script, waits: list[float], answer: Answer
) -> None:
    script.answers[HEAD] = [answer, answer, (200, OLD)]
    assert store.head("repo", "main").id == "old"
    assert script.seen[HEAD] == 3
    assert len(waits) == 2
    assert all(0 < wait < 1 for wait in waits)
    assert waits[0] != pytest.approx(0.1, abs=1e-12), "without jitter all writers come back together"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((400, {"message": "bad"}), StoreError),
        ((401, {"message": "who"}), StoreUnauthorized),
        ((403, {"message": "no"}), StoreUnauthorized),
        ((404, {"message": "none"}), NotFound),
        ((409, {"message": "raced"}), Conflict),
        ((500, {"message": "a bug"}), StoreError),
    ],
)
def test_any_other_refusal_is_raised_at_once(
    store: LakefsStore, script: Script, answer: Answer, error: type[StoreError]
) -> None:
    script.answers[HEAD] = [answer, (200, OLD)]
    with pytest.raises(error, match="repository repo, ref main") as caught:
        store.head("repo", "main")
    assert type(caught.value) is error
    assert script.seen[HEAD] == 1


def test_a_failure_that_lasts_is_unavailable_after_the_last_attempt(
    store: LakefsStore, script: Script, waits: list[float]
) -> None:
    script.answers[HEAD] = [(503, {"message": "slow down"})]
    with pytest.raises(StoreUnavailable, match="slow down"):
        store.head("repo", "main")
    assert (script.seen[HEAD], len(waits)) == (4, 3)


def test_a_page_that_fails_is_fetched_again_without_losing_or_doubling_items(
    store: LakefsStore, script: Script
) -> None:
    def page(names: list[str], more: bool) -> dict[str, object]:
        results = [{"id": name, "commit_id": "c"} for name in names]
        offset = names[-1] if more else ""
        return {
            "pagination": {"has_more": more, "next_offset": offset, "results": len(names), "max_per_page": 1000},
            "results": results,
        }

    busy = (503, {"message": "slow down"})
    script.answers[f"GET {BASE}/branches"] = [(200, page(["a", "b"], True)), busy, (200, page(["c"], False))]
    assert list(store.branches("repo")) == ["a", "b", "c"]


def _commit_script(script: Script, commit: list[Answer], log: list[object], staged: list[object]) -> None:
    def listing(items: list[object]) -> Answer:
        pagination = {"has_more": False, "next_offset": "", "results": len(items), "max_per_page": 1000}
        return 200, {"pagination": pagination, "results": items}

    script.answers |= {
        HEAD: [(200, OLD)],
        f"GET {BASE}/commits/new": [(200, NEW)],
        f"POST {BASE}/branches/main/commits": commit,
        f"GET {BASE}/refs/main/commits": [listing(log)],
        f"GET {BASE}/branches/main/diff": [listing(staged)],
    }


def test_a_commit_whose_answer_was_lost_is_found_and_not_reported_as_nothing(
    store: LakefsStore, script: Script
) -> None:
    _commit_script(script, commit=[(0, None), NO_CHANGES], log=[NEW, OLD], staged=[])
    assert store.commit("repo", "main", "harvest", {"k": "v"}).id == "new"


def test_an_older_commit_of_the_same_words_is_not_taken_for_this_one(store: LakefsStore, script: Script) -> None:
    _commit_script(script, commit=[NO_CHANGES], log=[OLD, NEW], staged=[])
    with pytest.raises(NothingToCommit):
        store.commit("repo", "main", "harvest", {"k": "v"})


def test_a_false_no_changes_is_tried_again_while_objects_are_staged(store: LakefsStore, script: Script) -> None:
    staged: list[object] = [{"type": "added", "path": "a", "path_type": "object"}]
    _commit_script(script, commit=[NO_CHANGES, (201, NEW)], log=[OLD], staged=staged)
    assert store.commit("repo", "main", "harvest", {"k": "v"}).id == "new"
    assert script.seen[f"POST {BASE}/branches/main/commits"] == 2
