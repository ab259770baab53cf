"""One trial of the promotion gate each: a sample of real paired results, and what the real rule makes of it.

Every trial takes its own randomness and gives a list of outcomes, a column each.

- Nulls: candidate and incumbent exchanged at random for each conversation, so that the true difference is 0.
  ``sharp`` asks for a gain above 0 with all requests in one slice, where nothing but the bound stands in the way;
  ``default`` is the policy as shipped.
- Mix shift: the mix of workloads that the incumbent's training saw and the gate's are drawn apart, trial by trial
  (Dirichlet, all mixes alike). ``easier`` moves 10 points to the workload with the longest acceptance length.
- The published TIDE rule promotes when the mean of the per-request acceptance lengths of the new draft on the
  evaluation set is above the old draft's mean on the training set; best-by-simulated-length (SpecForge) compares the
  means on one set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tests.bench.decisions.gains import different, harmed_gains, reseeded, slices_with, with_gain, workloads
from tests.bench.decisions.paired import Ints, Sample, Walked, draw, exchanged, joined, sample
from tide.config import PromotionPolicy
from tide.domain import Verdict
from tide.promotion.rule import decide

Trial = Callable[[np.random.Generator], list[bool]]

SHARP = PromotionPolicy(min_gain=0.0, min_slice_requests=1_000_000, context_bounds=())
DEFAULT = PromotionPolicy()


def judge(trial: Sample, policy: PromotionPolicy) -> Verdict:
    """The real gate on a trial, first attempt."""
    return decide(*trial.reports(), policy, attempt=1, states_commit="commit", policy_digest="bench")


def promoted(trial: Sample, policy: PromotionPolicy) -> bool:
    """Whether the gate promotes."""
    return judge(trial, policy).outcome == "promote"


def null(rng: np.random.Generator, requests: int, policies: Sequence[PromotionPolicy]) -> list[bool]:
    """Gate under each policy, TIDE's rule, best by mean length: on an exact null, one mix everywhere."""
    pair = _any(different(), rng)
    new, old = (exchanged(pair, draw(pair, requests, rng), rng) for _ in range(2))
    return [*(promoted(new, policy) for policy in policies), *_others(new, old)]


def shifted(
    rng: np.random.Generator, requests: int, policies: Sequence[PromotionPolicy], *, easier: bool = False
) -> list[bool]:
    """The same with another mix at the gate than in training."""
    pair = _any(different(), rng)
    names = workloads(pair)
    if easier:
        trained = dict.fromkeys(names, 1 / len(names))
        order = sorted(names, key=lambda w: sum(pair.lengths(w)))
        gate = trained | {order[-1]: trained[order[-1]] + 0.1, order[0]: trained[order[0]] - 0.1}
    else:
        trained, gate = (dict(zip(names, rng.dirichlet(np.ones(len(names))), strict=True)) for _ in range(2))
    new, old = (exchanged(pair, draw(pair, requests, rng, mix), rng) for mix in (gate, trained))
    return [*(promoted(new, policy) for policy in policies), *_others(new, old)]


def _others(new: Sample, old: Sample) -> list[bool]:
    """What TIDE's rule and best-by-simulated-length would have promoted."""
    return [new.mean_lengths[0] > old.mean_lengths[1], new.mean_lengths[0] > new.mean_lengths[1]]


def seeds(rng: np.random.Generator, requests: int) -> list[bool]:
    """Promoted; promoted though the gain on the further requests is at most ``min_gain``."""
    pair = _any(reseeded(), rng)
    ours = int(rng.integers(2))
    order = rng.permutation(pair.conversations())
    cut = int(np.searchsorted(np.cumsum(np.diff(pair.starts)[order]), requests)) + 1
    here, further = (_fixed(pair, part, ours) for part in (order[:cut], order[cut:]))
    if not promoted(here, DEFAULT):
        return [False, False]
    tokens = further.tokens.sum()
    return [True, bool(tokens / further.ours.sum() - tokens / further.theirs.sum() <= DEFAULT.min_gain)]


def _fixed(pair: Walked, conversations: Ints, ours: int) -> Sample:
    chosen: npt.NDArray[np.intp] = np.full(len(conversations), ours)
    return sample(pair, conversations, chosen, 1 - chosen)


def one_slice(rng: np.random.Generator, gain: float, requests: int) -> list[bool]:
    """Promoted at a true gain, ``min_gain`` 0, one workload in turn."""
    names = slices_with(gain)
    found = with_gain(str(rng.choice(names)), gain, requests, rng)
    return [promoted(found, PromotionPolicy(min_gain=0.0))]


def three_slices(rng: np.random.Generator, gain: float, requests: int) -> list[bool]:
    """Promoted at a true gain in every slice, ``min_gain`` .02 and margin .05."""
    names = slices_with(gain)
    parts = [with_gain(name, gain, count, rng) for name, count in zip(names, _split(requests, len(names)), strict=True)]
    return [promoted(joined(parts), PromotionPolicy(min_gain=0.02, slice_margin=0.05))]


def one_harmed(rng: np.random.Generator, overall: float, harm: float, requests: int) -> list[bool]:
    """Not promoted; rejected: with a gain in total and a loss in one slice, each slice in turn."""
    names = tuple(slices_with(harm))
    gains = harmed_gains(names, str(rng.choice(names)), overall, harm)
    counts = _split(requests, len(names))
    parts = [with_gain(name, gain, count, rng) for (name, gain), count in zip(gains.items(), counts, strict=True)]
    outcome = judge(joined(parts), DEFAULT).outcome
    return [outcome != "promote", outcome == "reject"]


def _any(found: Sequence[Walked], rng: np.random.Generator) -> Walked:
    return found[int(rng.integers(len(found)))]


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]
