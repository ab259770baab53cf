"""Measuring an engine's profile: what its steps and its prefill cost, with and without speculation.

Owns which engines can be compared and what their times say of draft steps and verification; ``step_times`` has what is
sent. Works over the engine port; knows nothing of stores, or of what a profile is used for.

What an engine notices: answers of a fixed length to prompts that begin with a number of their own, so that nothing is
found in the prefix cache, which is not flushed; states are not logged; the requests stand in the request table under
the slice ``tide-probe``. Other traffic makes steps look slower than they are: measure an engine that has none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tide.domain import EngineProfile, ProfilePoint, TargetContract
from tide.engine.base import Engine, Speculation
from tide.errors import ContractMismatch, EvaluationError
from tide.throughput.step_times import Ask, EngineTimes, Plan, Report, at_once, take_times


def measure(
    plain: Engine,
    speculative: Sequence[Engine],
    plan: Plan,
    *,
    machine: str = "",
    report: Report = lambda _: None,
    ask: Ask = at_once,
    between: Callable[[], object] = lambda: None,
) -> EngineProfile:
    """The profile of a target's engine.

    Args:
        plain: serves the target without speculation.
        speculative: serve it with one draft and different numbers of draft steps. A single one gives a profile that is
            bound to its steps; two and more tell draft steps from verification.
        machine: what the engines run on, for the record.
        report: takes one line of progress at a time.
        ask: another way of asking, for tests.
        between: called after each repeat, the engines idle: what the profile is to be compared with is measured there,
            since the speed of a shared machine drifts.

    Raises:
        EvaluationError: the engines are not what they should be, or an answer told nothing.
        ContractMismatch: the speculative engines serve different targets.
        EngineError: an engine failed.
    """
    settings = [engine.speculation() for engine in speculative]
    _check(plain.speculation(), settings)
    target = _target(speculative)
    base, *ours = take_times([plain, *speculative], plan, report, ask, between)
    first, bound = settings[0], len(settings) == 1
    return EngineProfile(
        target=target,
        engine=first.engine,
        machine=machine,
        steps=first.steps if bound else None,
        topk=max(first.topk, 1),
        draft_tokens=first.draft_tokens if bound else None,
        prefill_request_s=base.prefill_request_s,
        prefill_token_s=base.prefill_token_s,
        draft_prefill_request_s=_added(base.prefill_request_s, [t.prefill_request_s for t in ours]),
        draft_prefill_token_s=_added(base.prefill_token_s, [t.prefill_token_s for t in ours]),
        points=tuple(_point(b, base, {s.steps: t for s, t in zip(settings, ours, strict=True)}) for b in base.step_s),
        measured_at=time.time(),
    )


def _added(plain_s: float, speculative_s: Sequence[float]) -> float:
    """What the draft adds. Its share of a prefill is small: noise may make it less than nothing."""
    return max(statistics.fmean(speculative_s) - plain_s, 0.0)


def _point(concurrency: int, plain: EngineTimes, speculative: Mapping[int, EngineTimes]) -> ProfilePoint:
    """The line through the speculative steps by their number of draft steps; a single one stands for itself.

    Raises:
        EvaluationError: the machine was too noisy for any sense.
    """
    plain_s = plain.step_s[concurrency]
    seconds = [times.step_s[concurrency] for times in speculative.values()]
    draft, verify = 0.0, seconds[0]
    if len(seconds) > 1:
        draft, verify = (float(x) for x in np.polyfit(list(speculative), seconds, 1))
        if draft < 0:  # less than noise
            draft, verify = 0.0, statistics.fmean(seconds)
    if min(plain_s, verify) <= 0:
        raise EvaluationError(
            f"at concurrency {concurrency} a plain step took {plain_s:.4f} s and a verification {verify:.4f} s: "
            "something else used the engine; measure while it is idle, with more repeats"
        )
    return ProfilePoint(concurrency=concurrency, plain_step_s=plain_s, verify_step_s=verify, draft_step_s=draft)


def _check(plain: Speculation, speculative: Sequence[Speculation]) -> None:
    """Raises EvaluationError unless a plain engine and speculative ones can be compared."""
    if not speculative:
        raise EvaluationError("no speculative engine was given: name at least the replica that serves")
    if plain.speculative:
        raise EvaluationError("the plain engine speculates: start one of the same target without a draft")
    if not all(s.speculative for s in speculative):
        raise EvaluationError("an engine given as speculative does not speculate: name replicas that serve a draft")
    if len({s.steps for s in speculative}) < len(speculative):
        raise EvaluationError("two speculative engines take the same number of draft steps: one says all of it")
    if len(speculative) > 1 and any(s.topk > 1 or s.draft_tokens != s.steps + 1 for s in speculative):
        raise EvaluationError(
            "the cost of a tree is bound to its steps and its tokens: profile the one speculative engine that serves"
        )


def _target(speculative: Sequence[Engine]) -> TargetContract | None:
    known = [facts.target for facts in (engine.facts() for engine in speculative) if facts.target is not None]
    for other in known[1:]:
        if parts := known[0].differences(other):
            raise ContractMismatch("target (of the speculative engines)", parts)
    return known[0] if known else None
