"""The verdict as one HTML file for a person: the reason, the paired differences, slices with intervals, the family.

Owns the page. It needs nothing from elsewhere: no script, no font, no picture outside it; every text in it is escaped,
as the names of slices come from requests. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from tide.config import PromotionPolicy
from tide.domain import EvalReport, SliceVerdict, Verdict
from tide.promotion.verdict_plots import difference_plot, interval_plot
from tide.promotion.verdict_text import figures, sentence

SUFFIX = ".html"
"""Of the file beside a verdict in the ledger."""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2733;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}code{font-size:.85em}
.promote{color:#176b3a}.reject{color:#a3262a}.inconclusive{color:#8a5a00}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #d8dee4}
th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}
"""
_COLUMNS = ("slice", "requests", "candidate", "incumbent", "difference", "low", "high", "detectable", "more needed")


def render(verdict: Verdict, candidate: EvalReport, incumbent: EvalReport, policy: PromotionPolicy) -> str:
    """The page.

    Args:
        candidate, incumbent: the reports that the verdict was made on.
        policy: what it was made by, for the thresholds in the plots.
    """
    rows = (verdict.overall, *verdict.slices)
    parts = [
        f'<h1><span class="{verdict.outcome}">{verdict.outcome}</span>: {_draft(verdict.candidate)} against '
        f"{_draft(verdict.incumbent)}</h1>",
        f"<p>{escape(sentence(verdict))}</p>",
        "<h2>Difference in acceptance length, with one-sided bounds</h2>",
        interval_plot(rows, policy),
        _table(rows),
        "<h2>Paired differences, conversation by conversation</h2>",
        difference_plot(candidate, incumbent),
        "<h2>What stands behind it</h2>",
        _list(figures(verdict)),
        "<h2>Reasons, the one that decided first</h2>",
        _list(verdict.reasons),
        f"<p><small>States <code>{escape(verdict.states_commit[:12])}</code>, policy "
        f"<code>{escape(verdict.policy[:12])}</code>, acceptance as {escape(verdict.definition)}, sampling "
        f"{escape(verdict.sampling)}.</small></p>",
    ]
    title = escape(f"{verdict.outcome}: {verdict.candidate[:12]} against {verdict.incumbent[:12]}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{chr(10).join(parts)}\n</body></html>\n'


def _draft(digest: str) -> str:
    return f"<code>{escape(digest[:12])}</code>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(rows: tuple[SliceVerdict, ...]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return f"<table><tr>{head}</tr>{''.join(map(_row, rows))}</table>"


def _row(item: SliceVerdict) -> str:
    d, effect = item.difference, item.detectable_effect
    cells = (
        escape(item.slice),
        str(item.requests),
        f"{item.candidate:.3f}",
        f"{item.incumbent:.3f}",
        f"{d.estimate:+.3f}",
        f"{d.low:+.3f}",
        f"{d.high:+.3f}",
        "-" if effect is None else f"{effect:.3f}",
        str(item.more_requests or "-"),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
