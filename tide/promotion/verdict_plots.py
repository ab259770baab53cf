"""The two plots of a verdict, as SVG text: intervals by slice, and how the paired differences spread.

Owns geometry and colours. Small whatever the number of requests; texts are escaped. Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from tide.config import PromotionPolicy
from tide.domain import EvalReport, SliceVerdict
from tide.promotion.slices import Paired

WIDTH, LABEL, ROW, FOOT = 720, 170, 24, 30
BINS = 41
_GOOD, _BAD, _LINE, _QUIET = "#176b3a", "#a3262a", "#5b6b7a", "#c5ced6"


def interval_plot(rows: Sequence[SliceVerdict], policy: PromotionPolicy) -> str:
    """Estimate and bounds of each slice over one axis; dashed: what is asked for, ``min_gain`` or the margin."""
    margins = [-policy.slice_margins.get(s.slice, policy.slice_margin) for s in rows[1:]]
    shown = [v for s in rows for v in (s.difference.low, s.difference.high)] + [0.0, policy.min_gain, *margins]
    axis = _Axis(min(shown), max(shown))
    parts = [axis.line(0.0, ROW * len(rows), _QUIET)]
    for index, item in enumerate(rows):
        least = policy.min_gain if index == 0 else margins[index - 1]
        parts += _interval(axis, item, index * ROW, least)
    return _svg([*parts, *axis.ends(ROW * len(rows))], ROW * len(rows) + FOOT)


def _interval(axis: _Axis, item: SliceVerdict, top: float, least: float) -> list[str]:
    d, middle = item.difference, top + ROW / 2
    colour = _GOOD if d.low > least else _BAD if d.high < least else _LINE
    label = item.slice if len(item.slice) <= 24 else f"{item.slice[:23]}…"
    tip = f"{item.slice}: {d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}], at least {least:+.3f} is asked for"
    return [
        f'<text x="0" y="{middle + 4:.1f}" font-size="12">{escape(label)}</text>',
        f'<line x1="{axis.x(d.low):.1f}" x2="{axis.x(d.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
        f'stroke="{colour}" stroke-width="3"><title>{escape(tip)}</title></line>',
        f'<circle cx="{axis.x(d.estimate):.1f}" cy="{middle:.1f}" r="4.5" fill="{colour}"/>',
        f'<line x1="{axis.x(least):.1f}" x2="{axis.x(least):.1f}" y1="{top + 3:.1f}" y2="{top + ROW - 3:.1f}" '
        f'stroke="{_LINE}" stroke-dasharray="3 2"/>',
    ]


def difference_plot(candidate: EvalReport, incumbent: EvalReport) -> str:
    """Histogram of candidate minus incumbent over conversations, in acceptance length; gains are right of 0."""
    differences = _by_conversation(Paired.of(candidate, incumbent))
    reach = float(np.abs(differences).max()) or 1.0
    counts, edges = np.histogram(differences, BINS, (-reach, reach))
    axis, height, tallest = _Axis(-reach, reach), 150.0, max(int(counts.max()), 1)
    parts = [axis.line(0.0, height, _QUIET)]
    for count, left, right in zip(counts.tolist(), edges.tolist(), edges.tolist()[1:], strict=False):
        size = height * count / tallest
        colour = _LINE if left < 0 < right else _GOOD if right > 0 else _BAD
        parts.append(
            f'<rect x="{axis.x(left):.1f}" width="{axis.x(right) - axis.x(left) - 1:.1f}" y="{height - size:.1f}" '
            f'height="{size:.1f}" fill="{colour}"><title>{count} from {left:+.2f} to {right:+.2f}</title></rect>'
        )
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    said = f"{better} conversations better, {worse} worse, {len(differences) - better - worse} equal"
    parts.append(f'<text x="0" y="14" font-size="12">{said}</text>')
    return _svg([*parts, *axis.ends(height)], height + FOOT)


def _by_conversation(paired: Paired) -> npt.NDArray[np.float64]:
    """[conversations] difference of pooled acceptance lengths."""
    _, member = np.unique(paired.conversations, return_inverse=True)
    tokens_c, steps_c, tokens_i, steps_i = (np.bincount(member, paired.sums[:, column]) for column in range(4))
    found: npt.NDArray[np.float64] = tokens_c / steps_c - tokens_i / steps_i
    return found


class _Axis:
    """Maps differences to places right of the labels."""

    def __init__(self, low: float, high: float) -> None:
        room = 0.05 * (high - low) or 0.05
        self.low, self.high = low - room, high + room

    def x(self, value: float) -> float:
        return LABEL + (WIDTH - LABEL) * (value - self.low) / (self.high - self.low)

    def line(self, value: float, height: float, colour: str) -> str:
        return f'<line x1="{self.x(value):.1f}" x2="{self.x(value):.1f}" y1="0" y2="{height}" stroke="{colour}"/>'

    def ends(self, top: float) -> list[str]:
        places = ((LABEL, "start", self.low), (self.x(0.0), "middle", 0.0), (WIDTH, "end", self.high))
        return [
            f'<text x="{x:.1f}" y="{top + 18}" font-size="11" text-anchor="{anchor}">{value:+.2f}</text>'
            for x, anchor, value in places
        ]


def _svg(parts: Sequence[str], height: float) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{"".join(parts)}</svg>'
