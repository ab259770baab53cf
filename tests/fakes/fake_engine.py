"""An engine in memory: scripted acceptance, recorded swaps, failures on demand. A subclass of the port, so no drift."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from tide.domain import PROBE_SLICE, DraftContract, TargetContract
from tide.engine.base import Engine, EngineFacts, Generation, Speculation, SwapResult
from tide.errors import EngineError, EngineUnavailable, SwapRefused

NO_DRAFT = "none"


class FakeEngine(Engine):
    """One replica that serves without a model.

    Args:
        name: name of the replica.
        acceptance: acceptance length by draft digest; 1.0 for a draft not named.
        steps: tokens proposed in a verify step.
        target, contract: what ``facts`` reports.
        draft: digest in serving at the start.
        known: digests that a swap finds; None: any.
    """

    def __init__(
        self,
        name: str = "fake-0",
        *,
        acceptance: Mapping[str, float] | None = None,
        target: TargetContract | None = None,
        contract: DraftContract | None = None,
        draft: str = NO_DRAFT,
        known: set[str] | None = None,
        steps: int = 3,
    ) -> None:
        self._name, self._draft, self._steps = name, draft, steps
        self.acceptance = dict(acceptance or {})
        self.target, self.contract, self.known = target, contract, known
        self.healthy = True
        self.swaps: list[tuple[str, str]] = []
        """Every swap that happened: (before, after)."""
        self.generated: list[str] = []
        """The draft that served each request, in order."""
        self.flushes = 0
        self.capture_rates: list[float] = []
        """Every rate that was set, in order."""
        self.before_swap: Callable[[str], None] | None = None
        """Called with the digest before a swap is carried out; what it raises is the swap's failure."""
        self.after_swap: Callable[[str], None] | None = None
        """The same once the swap HAS happened: an answer that was lost."""
        self._ids = itertools.count()

    @property
    def name(self) -> str:
        return self._name

    def check_health(self) -> None:
        if not self.healthy:
            raise EngineUnavailable(f"{self.name}: not healthy")

    def facts(self) -> EngineFacts:
        self.check_health()
        return EngineFacts(
            engine="fake 1",
            target=self.target,
            draft=self._draft,
            draft_contract=self.contract,
            speculative_steps=self._steps,
            speculative_topk=1,
            draft_tokens=self._steps + 1,
        )

    def speculation(self) -> Speculation:
        self.check_health()
        speculative = self._steps > 0
        return Speculation(
            engine="fake 1",
            speculative=speculative,
            steps=self._steps,
            topk=int(speculative),
            draft_tokens=self._steps + 1 if speculative else 0,
        )

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
        self.check_health()
        if not messages:
            raise EngineError(f"{self.name}: no messages")
        length = min(max(self.acceptance.get(self._draft, 1.0), 1.0), self._steps + 1.0)
        steps = max(1, round(max_new_tokens / length))
        self.generated.append(self._draft)
        return Generation(
            request=request or f"{self.name}-{next(self._ids)}",
            text=f"answer to {messages[-1]['content']}",
            output_ids=tuple(range(max_new_tokens)),
            prompt_tokens=sum(len(m["content"].split()) for m in messages),
            completion_tokens=max_new_tokens,
            verify_steps=steps,
            proposed=steps * self._steps,
            accepted=max(0, max_new_tokens - steps),
            finish_reason="length",
            latency_s=0.0,
        )

    def probe(self, *, timeout_s: float) -> Generation:
        return self.generate([{"role": "user", "content": "probe"}], max_new_tokens=8, slice=PROBE_SLICE, no_logs=True)

    def active_draft(self) -> str:
        self.check_health()
        return self._draft

    def swap_draft(self, digest: str) -> SwapResult:
        self.check_health()
        if self.before_swap is not None:
            self.before_swap(digest)
        if self.known is not None and digest not in self.known:
            raise SwapRefused(f"{self.name}: draft {digest[:12]} is not here")
        before, self._draft = self._draft, digest
        self.swaps.append((before, digest))
        if self.after_swap is not None:
            self.after_swap(digest)
        return SwapResult(before=before, after=digest, seconds=0.0)

    def set_capture_rate(self, rate: float) -> None:
        self.check_health()
        if not 0 <= rate <= 1:
            raise EngineError(f"{self.name}: a capture rate of {rate} was refused: it takes 0 to 1")
        self.capture_rates.append(rate)

    def flush_cache(self) -> None:
        self.check_health()
        self.flushes += 1
