"""The drift report in the making: what the checks have found so far, and what the report before says.

Owns that a retrain beats a watch and that the first cause is the one named. Knows nothing of what is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tide.config import DriftPolicy
from tide.domain import DriftReport

Decision = Literal["none", "watch", "retrain"]
Cause = Literal["drift", "bootstrap", "headroom", "engine"]


@dataclass
class State:
    """Decision, reasons and figures so far."""

    policy: DriftPolicy
    previous: DriftReport | None
    """The report before this one on the same draft."""
    decision: Decision = "none"
    cause: Cause | None = None
    reasons: list[str] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)

    def carried(self, name: str, otherwise: float = 0.0) -> float:
        """A figure of the report before; ``otherwise`` when it has none."""
        value = self.previous.figures.get(name) if self.previous else None
        return otherwise if value is None else value

    def retrain(self, cause: Cause, reason: str) -> None:
        """Ask for a draft, unless that was done; the reason counts in any case."""
        self.reasons.append(reason)
        if self.decision != "retrain":
            self.decision, self.cause = "retrain", cause

    def watch(self, reason: str, cause: Cause | None = None) -> None:
        """Worth a look; a retrain that was asked for stands."""
        self.reasons.append(reason)
        if self.decision == "none":
            self.decision, self.cause = "watch", cause
