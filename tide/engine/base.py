"""The engine port: what TIDE asks of one replica of a running service.

Owns the records that come back. Knows nothing of HTTP, processes or how the swap is carried out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from tide.domain import DraftContract, Record, TargetContract


class EngineFacts(Record):
    """What a replica is, as reported by the plugin inside it."""

    engine: str
    """Engine name and version, for example ``sglang 0.5.23``."""
    target: TargetContract | None
    draft: str
    """Digest of the draft in serving, or ``none``."""
    draft_contract: DraftContract | None
    speculative_steps: int
    speculative_topk: int
    draft_tokens: int
    """Tokens verified in one step, the newest known token included."""
    capture: dict[str, Any] = Field(default_factory=dict)
    """Counters of the tap: ``rows``, ``dropped`` and ``excluded`` by reason, ``enabled``."""


class Speculation(Record):
    """How a replica decodes, by the engine's own word: known without the plugin."""

    engine: str
    """Engine name and version, for example ``sglang 0.5.23``."""
    speculative: bool
    steps: int
    """Draft steps of a verify step; 0 when it does not speculate, or verifies without a draft."""
    topk: int
    draft_tokens: int
    """Tokens verified in one step, the newest known token included; 0 when it does not speculate."""


class Generation(Record):
    """One answer, with the acceptance counters of its own request. Counters are None when there was no verify step."""

    request: str
    text: str
    output_ids: tuple[int, ...] = ()
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    verify_steps: int | None = None
    proposed: int | None = None
    accepted: int | None = None
    finish_reason: str = ""
    latency_s: float


class SwapResult(Record):
    """A draft swap that happened."""

    before: str
    after: str
    seconds: float
    """From asking for the pause until generation went on."""


class Engine(ABC):
    """One replica. Every method may raise EngineUnavailable (transient) or EngineError."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the replica, unique in the service."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises EngineUnavailable unless the replica answers and is healthy."""

    @abstractmethod
    def facts(self) -> EngineFacts:
        """Identity, speculation settings, active draft and capture counters."""

    @abstractmethod
    def speculation(self) -> Speculation:
        """How it decodes; an engine without the plugin says so too."""

    @abstractmethod
    def generate(
        self,
        messages: Sequence[dict[str, str]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        conversation: str | None = None,
        slice: str | None = None,
        no_logs: bool = False,
        ignore_eos: bool = False,
        request: str | None = None,
    ) -> Generation:
        """Answer one chat. ``conversation``, ``slice`` and ``no_logs`` reach the tap as ``custom_params.tide``."""

    @abstractmethod
    def probe(self, *, timeout_s: float) -> Generation:
        """A short answer that TIDE itself asks for, to see that the replica generates, and with verify steps.

        It is no traffic: of the slice ``PROBE_SLICE``, its states never logged. Raises EngineUnavailable when it takes
        longer: a web server may answer for an hour without a scheduler.
        """

    @abstractmethod
    def active_draft(self) -> str:
        """Digest of the draft in serving, or ``none``."""

    @abstractmethod
    def swap_draft(self, digest: str) -> SwapResult:
        """Replace the draft while serving: pause in place, swap, continue. Continue always happens.

        Raises SwapRefused when the engine refused; the draft in serving is then unchanged.
        """

    @abstractmethod
    def set_capture_rate(self, rate: float) -> None:
        """Capture the states of this share of the requests that arrive from now on, 0 to 1; counters stay whole.

        It holds until the replica starts again. Raises EngineError when the replica captures nothing or refuses.
        """

    @abstractmethod
    def flush_cache(self) -> None:
        """Drop the prefix cache; only an idle replica can."""
