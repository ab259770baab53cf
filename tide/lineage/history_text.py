"""History and lineage as a person reads them: text, a tree, a mermaid diagram. Owns wording, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from tide.errors import ConfigError
from tide.lineage.history import Event, Origin, Served


def moment(at: float) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def parse_moment(text: str) -> float:
    """Seconds since the epoch of an ISO 8601 time; UTC when it names no zone.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no time: write 2026-11-30T09:00, or with a zone 2026-11-30T09:00+01:00"
        ) from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def table(changes: Sequence[Served]) -> str:
    """One line a generation, oldest first."""
    if not changes:
        return "nothing was promoted yet"
    return "\n".join(map(_row, changes))


def _row(change: Served) -> str:
    previous = (change.previous or "none")[:12]
    which = f"{change.generation:>4}  {moment(change.at)}  {change.kind:<9}"
    return f"{which}  {change.draft[:12]}  after {previous:<12}  {why(change)}"


def why(change: Served) -> str:
    """The gate's finding in a few words."""
    facts = change.verdict_facts
    if not facts:
        return "by hand" if change.verdict is None else f"verdict {change.verdict[:12]}"
    gain = f"{facts['difference']} (at least {facts['difference_low']})"
    approved = f", approved by {facts['approved_by'].replace(',', ', ')}" if facts.get("approved_by") else ""
    return f"{facts['outcome']}: {gain} on {facts['requests']} requests{approved}"


def tree(origin: Origin) -> str:
    """A draft back to the windows of its states, its parents below it."""
    return "\n".join(_lines(origin, ""))


def _lines(node: Origin, indent: str) -> Iterator[str]:
    served = f", generation {', '.join(map(str, node.generations))}" if node.generations else ", never served"
    yield f"{indent}draft {node.draft[:12]}{served}"
    facts = [_made(node), *map(_found, node.verdicts), _states(node)]
    facts = [fact for fact in facts if fact]
    for i, fact in enumerate(facts):
        last = i == len(facts) - 1 and node.parent is None
        yield f"{indent}{'└─' if last else '├─'} {fact}"
    if node.parent is not None:
        yield f"{indent}└─ from"
        yield from _lines(node.parent, indent + "   ")


def _made(node: Origin) -> str:
    if node.at is None:
        return "no record of its training: imported"
    facts = node.facts
    policy = facts.get("policy", "")[:12]
    return (
        f"trained {moment(node.at)}: {facts.get('cause', '?')}, {facts.get('steps', '?')} steps on "
        f"{facts.get('trained_tokens', '?')} tokens, seed {facts.get('seed', '?')}, policy {policy}"
    )


def _found(event: Event) -> str:
    facts = event.record.facts
    return (
        f"verdict {event.record.subject[:12]}: {facts['outcome']}, difference {facts['difference']} "
        f"(at least {facts['difference_low']}) on {facts['requests']} requests"
    )


def _states(node: Origin) -> str:
    if node.states is None or "@" not in node.states:
        return ""
    repository, _, commit = node.states.partition("@")
    windows = f"{len(node.windows)} windows, {node.windows[0]} to {node.windows[-1]}" if node.windows else "none found"
    return f"states {repository}@{commit[:12]}: {windows}{_lost(node)}"


def _lost(node: Origin) -> str:
    """What erasures took, in a few words; nothing when there was none."""
    return f"; rows lost by erasure {', '.join(node.erasures)}: not reproducible" if node.erasures else ""


def mermaid(origin: Origin) -> str:
    """A flowchart: windows to states to draft, parents to children."""
    lines, node = ["flowchart LR"], origin
    while True:
        name = f"d{node.draft[:12]}"
        label = "generation " + ", ".join(map(str, node.generations)) if node.generations else "never served"
        lines.append(f'  {name}["draft {node.draft[:12]}<br/>{label}"]')
        if node.states and "@" in node.states:
            repository, _, commit = node.states.partition("@")
            what = f"{repository}@{commit[:12]}<br/>{len(node.windows)} windows{_lost(node)}"
            lines.append(f'  s{commit[:12]}[("{what}")] --> {name}')
        if node.parent is None:
            return "\n".join(lines)
        lines.append(f"  d{node.parent.draft[:12]} -->|warm start| {name}")
        node = node.parent
