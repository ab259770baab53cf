"""Families of verdicts and their error rate: how alpha is shared among the verdicts that use the same gate requests.

Owns the spending of alpha, the counting of attempts and the expected false promotions. Knows nothing of shards, stores
or statistics.

A family is the verdicts on one gate generation against one incumbent. Its k-th verdict tests at 6 alpha / (pi^2 k^2),
which sums to alpha over all k: by Boole's inequality the chance of one false promotion or more in a family is at most
alpha, however the verdicts depend on one another through the requests they share. Testing one candidate again, on the
same requests or on more, is an attempt like any other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from tide.domain import Verdict

YEAR_S = 365.0 * 86_400


def attempt_alpha(alpha: float, attempt: int) -> float:
    """Share of a family's alpha that its k-th verdict gets: 6 alpha / (pi^2 k^2), which sums to alpha."""
    return 6 * alpha / (math.pi**2 * attempt**2)


def family_rate(alpha: float, attempts: int) -> float:
    """Chance of a false promotion in a family of so many verdicts, at most."""
    return sum(attempt_alpha(alpha, k) for k in range(1, attempts + 1))


def family_of(generation: str, incumbent: str) -> str:
    """Identity of the family of verdicts on a gate generation against an incumbent."""
    return hashlib.sha256(f"{generation}:{incumbent}".encode()).hexdigest()


def attempt_of(given: Sequence[Verdict], family: str) -> int:
    """Which attempt the next verdict of a family is: 1 for the first."""
    return 1 + sum(v.family == family for v in given)


def uses_of(given: Sequence[Verdict], generation: str) -> int:
    """Verdicts that a gate generation has given, against whatever incumbent."""
    return sum(v.gate is not None and v.gate.id == generation for v in given)


def false_promotions_a_year(alpha: float, *, generation_s: float, cycle_s: float, max_verdicts: int) -> float:
    """Expected false promotions a year, at most: a candidate in every cycle, none of them ever better.

    Args:
        alpha: error rate of a family.
        generation_s: seconds in which the gate requests of one generation come in.
        cycle_s: seconds between the verdicts that the schedule asks for.
        max_verdicts: verdicts that a generation gives.
    """
    families = YEAR_S / max(generation_s, cycle_s)
    verdicts = min(max(int(generation_s // cycle_s), 1), max_verdicts)
    return families * family_rate(alpha, verdicts)
