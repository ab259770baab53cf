"""Gate generations: which gate requests the next verdict is made on.

Owns when a generation is used again, when it grows and when a new one opens. Pure: manifests and the verdicts given so
far in, a choice out. Knows nothing of stores, of how alpha is spent (``families``) or of statistics.

A generation is an interval of closing times of held-out shards; its requests are the gate requests in it. Two
generations against one incumbent never share a request, since a later one holds only what closed after the earlier
one's end: a verdict of a new family is never helped by requests that were looked at before. The rules, in order:

1. No verdict was given against this incumbent: the newest requests open a generation. They may have been used against
   an incumbent before it. That errs on the safe side: the draft that serves now won on them, so they flatter it.
2. The candidate was tested on this generation before, inconclusively: it is tested on all that came since as well. The
   generation grows; the verdict is one more attempt of the same family.
3. As many wholly new requests are there as a generation asks for: they open the next one.
4. Else the generation is used again, as it is: what is new is kept for the next one, which would otherwise never fill
   up where verdicts are frequent.

A generation that gave ``max_verdicts`` is not grown: further verdicts on it are inconclusive until a new one opens.
Shards that are harvested late join the generation in whose interval they were closed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tide.domain import GateGeneration, Shard, Split, Verdict, split_of
from tide.promotion.families import uses_of
from tide.states.snapshots import choose_held_out

Shards = Sequence[tuple[str, Shard]]


def choose(
    shards: Shards, given: Sequence[Verdict], *, candidate: str, incumbent: str, requests: int, max_verdicts: int
) -> tuple[GateGeneration, list[tuple[str, Shard]]]:
    """The gate generation of the next verdict, and the shards that hold it.

    Args:
        shards: (path, manifest) of the ``held_out`` folder, oldest first.
        given: verdicts so far, oldest first, against any incumbent.
        requests: gate requests that a generation is opened with, at least, where there are as many.
    """
    own = [v for v in given if v.gate is not None and v.incumbent == incumbent and _same_target(v, shards)]
    if not own or own[-1].gate is None:
        return _open(choose_held_out(shards, Split.GATE, requests), requests)
    current = own[-1].gate
    until = max(v.gate.until for v in own if v.gate is not None and v.gate.id == current.id)
    fresh = [pair for pair in shards if pair[1].closed_at > until]
    used, waiting = uses_of(given, current.id), _count(fresh)
    grows = _inconclusive(own, current.id, candidate) and used < max_verdicts
    inside = [pair for pair in shards if current.first <= pair[1].closed_at and (grows or pair[1].closed_at <= until)]
    chosen = [pair for pair in inside if _count([pair])]
    if not chosen or (waiting >= requests and not grows):
        return _open(choose_held_out(fresh, Split.GATE, requests), requests)
    until = max(until, chosen[-1][1].closed_at)
    missing = requests if grows else requests - waiting
    found = current.model_copy(
        update={"until": until, "requests": _count(chosen), "used": used, "missing": max(missing, 0)}
    )
    return found, chosen


def _open(chosen: Shards, requests: int) -> tuple[GateGeneration, list[tuple[str, Shard]]]:
    ids = sorted(r.request for _, shard in chosen for r in shard.requests if split_of(r.conversation) is Split.GATE)
    generation = GateGeneration(
        id=hashlib.sha256("\n".join(ids).encode()).hexdigest(),
        first=chosen[0][1].closed_at if chosen else 0.0,
        until=chosen[-1][1].closed_at if chosen else 0.0,
        requests=len(ids),
        missing=requests,
    )
    return generation, list(chosen)


def _count(shards: Shards) -> int:
    """Gate requests in shards."""
    return sum(split_of(r.conversation) is Split.GATE for _, shard in shards for r in shard.requests)


def _inconclusive(own: Sequence[Verdict], generation: str, candidate: str) -> bool:
    """Whether the last verdict on this candidate was made on this generation and settled nothing."""
    last = next((v for v in reversed(own) if v.candidate == candidate), None)
    same = last is not None and last.gate is not None and last.gate.id == generation
    return same and last is not None and last.outcome == "inconclusive"


def _same_target(verdict: Verdict, shards: Shards) -> bool:
    return bool(shards) and verdict.target == shards[-1][1].target
