"""A verdict in words: the reason in one sentence, and the whole as markdown. Owns wording, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from tide.domain import SliceVerdict, Verdict

_DECIDED = {"promote": "Promoted", "reject": "Rejected", "inconclusive": "Not settled"}
_LITERAL = str.maketrans({c: f"\\{c}" for c in "\\`*<>|"})


def sentence(verdict: Verdict) -> str:
    """Why, in one sentence: the rule that decided, with its figures."""
    rule, _, finding = verdict.reasons[0].partition(": ")
    why = finding or rule
    if verdict.outcome == "promote":
        gain = verdict.overall.difference
        why = (
            f"it generates {verdict.overall.candidate:.3f} tokens a verify step against "
            f"{verdict.overall.incumbent:.3f}, a gain of {gain.estimate:+.3f} that is at least {gain.low:+.3f}, and "
            f"no slice is harmed"
        )
    return f"{_DECIDED[verdict.outcome]}: {why}."


def to_markdown(verdict: Verdict) -> str:
    """The verdict as a person reads it."""
    lines = [
        f"## {verdict.outcome}: {verdict.candidate[:12]} against {verdict.incumbent[:12]}",
        "",
        _escaped(sentence(verdict)),
        "",
        "| slice | requests | candidate | incumbent | difference | low | high | detectable | more needed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_row(s) for s in (verdict.overall, *verdict.slices)),
        "",
        *(f"{_escaped(line)}\n" for line in figures(verdict)),
        *(f"- {_escaped(reason)}" for reason in verdict.reasons),
    ]
    return "\n".join(lines)


def figures(verdict: Verdict) -> Iterator[str]:
    """What stands behind the outcome, a sentence each: bounds, power, family, throughput."""
    yield f"Bounds are one-sided at alpha {verdict.alpha:.4f} (attempt {verdict.attempt})."
    if verdict.detectable_effect is not None:
        yield f"So many requests show a true gain of {verdict.detectable_effect:.3f} four times in five."
    if verdict.more_requests:
        yield f"About {verdict.more_requests} further requests are needed."
    if verdict.gate is not None:
        yield (
            f"Gate generation {verdict.gate.id[:12]} of {verdict.gate.requests} requests had given {verdict.gate.used} "
            f"verdicts before; family {verdict.family[:12]}."
        )
    if verdict.family_alpha is not None:
        yield f"Of 100 families of verdicts at most {100 * verdict.family_alpha:.1f} promote a draft that is no better."
    if verdict.false_promotions_a_year is not None:
        yield (
            f"Expected false promotions a year: at most {verdict.false_promotions_a_year:.1f}, if every cycle brought "
            "a candidate and none were ever better, at this generation's traffic."
        )
    yield throughput_sentence(verdict)


def throughput_sentence(verdict: Verdict) -> str:
    """What the engine's profile predicts, or that nothing is predicted."""
    if (found := verdict.throughput) is None:
        return "Throughput is not predicted."
    pays = "pays" if found.candidate >= 1 else "does not pay"
    return (
        f"Predicted throughput: {found.candidate:.3f} times plain decoding, the incumbent's {found.incumbent:.3f}; "
        f"speculation {pays} at this load (it breaks even at an acceptance length of {found.break_even:.3f})."
    )


def _row(item: SliceVerdict) -> str:
    d, effect = item.difference, item.detectable_effect
    return (
        f"| {_escaped(item.slice)} | {item.requests} | {item.candidate:.3f} | {item.incumbent:.3f} "
        f"| {d.estimate:+.3f} | {d.low:+.3f} | {d.high:+.3f} "
        f"| {'-' if effect is None else f'{effect:.3f}'} | {item.more_requests or '-'} |"
    )


def _escaped(text: str) -> str:
    """Names of slices come from requests: no markup, no link, no further column, no further line."""
    return " ".join(text.split()).translate(_LITERAL).replace("](", "]\\(")
