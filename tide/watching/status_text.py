"""The status screen in words: lines with a tone, from a Status. Pure; knows nothing of terminals.

Texts of the service come from requests and from other hosts: control characters are taken out of every line, so that
none can move the cursor or fake another line.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from tide.watching.observed import Backlog, ReplicaView, ServingView
from tide.watching.status import Acceptance, Part, Status

Tone = Literal["title", "plain", "good", "warn", "bad", "dim"]
_COLLAPSED = 1.005
"""An acceptance length this close to 1 accepts nothing: speculation is pure cost."""


class Line(NamedTuple):
    """One line of the screen."""

    text: str
    tone: Tone = "plain"


def lines(status: Status) -> list[Line]:
    """The whole screen, top to bottom."""
    found = [*_head(status), *_replicas(status), *_acceptance(status), *_last(status), *_waiting(status)]
    found += [*_spool(status), *_parts(status.parts)]
    return _once([Line(_clean(line.text), line.tone) for line in found])


def _once(found: list[Line]) -> list[Line]:
    """A reason that hides several parts is told in full where it comes first."""
    told = set[str]()
    for number, line in enumerate(found):
        if line.tone == "bad" and line.text in told:
            found[number] = Line("  cannot be read, as above", "bad")
        told.add(line.text)
    return found


def plain(status: Status) -> str:
    """The screen as text."""
    return "\n".join(line.text for line in lines(status))


def _head(status: Status) -> Iterator[Line]:
    yield Line(f"{status.service}  {moment(status.at)}", "title")
    if status.serving is None:
        yield _missing(status, "serving", "serving.json")
    else:
        yield Line(_serving(status.serving, status.at))
        if status.serving.canary:
            yield Line(f"  a rollout is under way: {_pairs(status.serving.canary)}", "warn")


def _serving(serving: ServingView, now: float) -> str:
    if serving.generation == 0:
        return "  nothing was promoted yet"
    since = "" if serving.since is None else f" since {moment(serving.since)} ({age(now - serving.since)})"
    return f"  generation {serving.generation}, draft {serving.draft[:12]}{since}"


def _replicas(status: Status) -> Iterator[Line]:
    yield Line("replicas", "title")
    if "replicas" in status.errors:
        yield _missing(status, "replicas", "replicas")
    for replica in status.replicas:
        yield _replica(replica, status.serving)


def _replica(replica: ReplicaView, serving: ServingView | None) -> Line:
    name = f"  {replica.name:<12}"
    if not replica.reachable:
        return Line(f"{name} UNREACHABLE  {replica.detail}", "bad")
    notes = _live(replica)
    match replica.matches(serving):
        case True:
            return Line(f"{name} ok           serves {_short(replica.draft)}{notes}", "good")
        case False:
            wanted = serving.draft if serving else ""
            text = f"serves {_short(replica.draft)}, serving.json says {_short(wanted)}  -> tide reconcile"
            return Line(f"{name} MISMATCH     {text}{notes}", "bad")
        case _:
            return Line(f"{name} answers      serves {_short(replica.draft)}; serving.json is not known{notes}", "warn")


def _live(replica: ReplicaView) -> str:
    if replica.live is None:
        return f"; {replica.detail}" if replica.detail else ""
    dropped = replica.live.capture.get("dropped_rows_total", 0.0)
    rows = replica.live.capture.get("rows_total")
    captured = "" if rows is None else f"; {rows:.0f} rows captured, {dropped:.0f} dropped"
    running = "" if replica.live.running is None else f"; {replica.live.running:.0f} running"
    return f"{running}{captured}"


def _acceptance(status: Status) -> Iterator[Line]:
    yield Line("acceptance", "title")
    if "ledger" in status.errors:
        yield _missing(status, "ledger", "the ledger")
    elif status.acceptance is None:
        yield Line("  no drift report yet: run a cycle (`tide run adapt`)", "dim")
    else:
        yield _rate(status.acceptance)
    at_promotion = status.acceptance.length_at_promotion if status.acceptance else None
    for replica in status.replicas:
        if replica.live is not None:
            yield _length(replica, at_promotion)


def _rate(found: Acceptance) -> Line:
    source = f"drift report of {moment(found.at)}"
    if found.rate is None:
        return Line(f"  rate: no measured requests in the {source}", "dim")
    if found.baseline is None:
        return Line(f"  rate {found.rate:.3f}, no baseline to hold it against yet ({source})")
    known = found.cusum is not None and found.threshold is not None
    total = f"; sum of losses {found.cusum:.1f} of {found.threshold:.1f} sd" if known else ""
    lost = known and (found.cusum or 0) > (found.threshold or 0)
    return Line(
        f"  rate {found.rate:.3f} now, {found.baseline:.3f} baseline ({source}){total}", "warn" if lost else "plain"
    )


def _length(replica: ReplicaView, at_promotion: float | None) -> Line:
    assert replica.live is not None
    found = replica.live.accept_length
    if found is None:
        return Line(f"  {replica.name}: no length now (SGLang's /metrics: nothing decoded in its last interval)", "dim")
    held = "" if at_promotion is None else f", {at_promotion:.2f} by its verdict"
    collapsed = found <= _COLLAPSED
    note = "  COLLAPSED: nothing is accepted" if collapsed else ""
    text = f"  {replica.name}: length {found:.2f} now{held} (SGLang's /metrics, last interval){note}"
    return Line(text, "bad" if collapsed else "plain")


def _last(status: Status) -> Iterator[Line]:
    yield Line("last cycle", "title")
    if "ledger" in status.errors:
        yield _missing(status, "ledger", "the ledger")
    elif not status.last:
        yield Line("  none recorded yet", "dim")
    for found in status.last:
        yield Line(f"  {moment(found.at)}  {found.kind:<9} {found.outcome}: {found.why}")


def _waiting(status: Status) -> Iterator[Line]:
    yield Line("waits for a person", "title")
    if status.waiting is None:
        yield _missing(status, "waiting", "the ledger")
    elif not status.waiting:
        yield Line("  nothing", "dim")
    for found in status.waiting or ():
        since = f"since {moment(found.since)} ({age(status.at - found.since)}), until {moment(found.expires_at)}"
        agreed = f"{len(found.approved_by)} of {found.approvers} approvals"
        yield Line(
            f"  promotion of draft {found.candidate[:12]} on verdict {found.verdict[:12]}: {agreed}, {since}", "warn"
        )
        yield Line(f"    tide approve {found.run} --by NAME --why TEXT, or tide refuse", "dim")


def _spool(status: Status) -> Iterator[Line]:
    yield Line("spool", "title")
    if status.spool is None:
        yield _missing(status, "spool", "the spool")
    else:
        yield Line(_backlog(status.spool))
        if status.spool.quarantined:
            yield Line(f"  {status.spool.quarantined} files in quarantine: their .reason.json says why", "warn")


def _backlog(found: Backlog) -> str:
    if not found.files:
        return "  empty"
    oldest = (
        "no closed window"
        if found.oldest_closed_s is None
        else (f"{found.closed_files} of closed windows, the oldest closed {age(found.oldest_closed_s)} ago")
    )
    return f"  {found.files} files, {found.size / 1e6:.1f} MB; {oldest}"


def _parts(parts: tuple[Part, ...]) -> Iterator[Line]:
    yield Line("parts of the local stack", "title")
    for part in parts:
        memory = f"{part.memory_bytes / 2**20:.0f} MiB" if part.memory_bytes else ""
        tone: Tone = "bad" if part.state == "died" else "dim" if part.state == "stopped" else "plain"
        yield Line(f"  {part.name:<16} {part.state:<8} {part.pid or '':<8} {memory:<10} {part.url}".rstrip(), tone)


def _missing(status: Status, name: str, what: str) -> Line:
    return Line(f"  {what} cannot be read: {status.errors.get(name, 'unknown')}", "bad")


def moment(at: float) -> str:
    """A time in UTC, to the minute."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def age(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes = int(max(seconds, 0.0) // 60)
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {rest} min" if hours else f"{rest} min"


def _short(draft: str | None) -> str:
    return (draft or "")[:12]


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
