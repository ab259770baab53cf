"""The verdict that a person reads: one sentence first, the figures behind it, and nothing a request could inject."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.support.reports import paired_reports
from tests.unit.test_throughput_guard import PROFILE
from tide.config import PromotionPolicy
from tide.domain import EvalReport, GateGeneration, Verdict
from tide.promotion.rule import decide
from tide.promotion.verdict_report import render
from tide.promotion.verdict_text import sentence, to_markdown

POLICY = PromotionPolicy(resamples=400)
HOSTILE = '<script>alert("1")</script>|](http://x)'
GATE = GateGeneration(id="ab" * 32, first=0.0, until=7200.0, requests=120, used=1, missing=80)


def judged(gains: dict[str, float], count: int = 60, *, gated: bool = True) -> tuple[Verdict, EvalReport, EvalReport]:
    ours, theirs = paired_reports(gains, count)
    gate = GATE if gated else None
    options = {"attempt": 2, "states_commit": "commit", "policy_digest": "p" * 64}
    found = decide(ours, theirs, POLICY, gate=gate, profile=PROFILE, concurrency={1: 1.0}, **options)  # type: ignore[arg-type]
    return found, ours, theirs


class Texts(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "onclick")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_says_why_in_one_sentence_and_shows_every_slice() -> None:
    found, ours, theirs = judged({"chat": 0.4, "code": 0.4})
    page = Texts(render(found, ours, theirs, POLICY))
    assert found.outcome == "promote"
    assert page.texts.count(sentence(found)) == 1
    assert {"overall", "chat", "code"} <= set(page.texts)
    assert page.tags.count("svg") == 2
    assert set(found.reasons) <= set(page.texts)


@pytest.mark.parametrize("text", ["attempt 2", "120 requests had given 1 verdicts", "false promotions a year"])
def test_family_attempt_and_rate_are_shown_in_page_and_markdown(text: str) -> None:
    found, ours, theirs = judged({"chat": 0.4})
    assert text in render(found, ours, theirs, POLICY)
    assert text in to_markdown(found)


def test_predicted_throughput_is_shown() -> None:
    found, ours, theirs = judged({"chat": 0.4})
    assert found.throughput is not None
    for text in (render(found, ours, theirs, POLICY), to_markdown(found)):
        assert f"Predicted throughput: {found.throughput.candidate:.3f} times plain decoding" in text


def test_what_a_request_calls_its_slice_stays_text() -> None:
    found, ours, theirs = judged({HOSTILE: 0.3, "chat": 0.3})
    html = render(found, ours, theirs, POLICY)
    page = Texts(html)
    assert "script" not in page.tags
    assert HOSTILE in page.texts
    markdown = to_markdown(found)
    assert "<script" not in markdown.replace("\\<script", "")
    assert "](http" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {10}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    found, ours, theirs = judged({"chat": 0.4})
    page = Texts(render(found, ours, theirs, POLICY))
    assert page.links == []
    assert not {"link", "img", "iframe", "script"} & set(page.tags)


def test_the_plots_are_well_formed_and_small_whatever_the_number_of_requests() -> None:
    sizes = []
    for count in (60, 2000):
        found, ours, theirs = judged({HOSTILE: 0.3, "chat": -0.3}, count)
        html = render(found, ours, theirs, POLICY)
        for part in html.split("<svg")[1:]:
            ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
        sizes.append(len(html))
    assert sizes[1] < 1.2 * sizes[0]


def test_a_draft_over_itself_can_be_drawn() -> None:
    found, _, theirs = judged({"chat": 0.0})
    assert "0 conversations better, 0 worse, 60 equal" in render(found, theirs, theirs, POLICY)


def test_an_inconclusive_verdict_says_what_is_missing_of_each_slice() -> None:
    found, _, _ = judged({"chat": 0.06}, 40)
    assert found.outcome == "inconclusive"
    row = next(line for line in to_markdown(found).splitlines() if line.startswith("| overall"))
    assert row.endswith(f"| {found.overall.more_requests} |")
    assert found.overall.more_requests > 0


def test_markdown_begins_with_outcome_and_reason() -> None:
    found, _, _ = judged({"chat": 0.4})
    lines = to_markdown(found).splitlines()
    assert lines[0].startswith("## promote: ")
    assert lines[2].startswith("Promoted: it generates")


def test_outside_the_services_gate_there_is_no_family() -> None:
    found, _, _ = judged({"chat": 0.4}, gated=False)
    assert (found.gate, found.family, found.false_promotions_a_year) == (None, "", None)
    assert "family " not in to_markdown(found).replace("of a family of", "")
