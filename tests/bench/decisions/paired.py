"""Paired results of real drafts, and what trials make of them: samples of conversations, nulls, true gains.

Owns the resampling. A made candidate or incumbent is always a choice, conversation by conversation, between results
that real drafts had on that very conversation, so that the difference and its spread are real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from tests.bench.decisions.corpus import Scores
from tests.support.reports import CANDIDATE, INCUMBENT, report
from tide.domain import EvalReport, RequestScore

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Walked:
    """Several drafts on the requests that all of them were walked over, by conversation."""

    names: tuple[str, ...]
    tokens: Ints
    steps: Ints
    """[n, drafts] verify steps."""
    workload: npt.NDArray[np.str_]
    slice: npt.NDArray[np.str_]
    prompt_tokens: Ints
    starts: Ints
    """[conversations + 1] where each begins."""

    @classmethod
    def of(cls, names: tuple[str, ...], scores: Mapping[str, Scores]) -> Walked:
        """Join drafts by request."""
        shared = reduce(np.intersect1d, (scores[name].request for name in names))
        found = [scores[name].take(np.isin(scores[name].request, shared)) for name in names]
        found = [draft.take(np.argsort(draft.request, kind="stable")) for draft in found]
        first, steps = found[0], np.stack([draft.verify_steps for draft in found], axis=1)
        alike = np.all([draft.tokens == first.tokens for draft in found], axis=0) & (steps > 0).all(axis=1)
        order = np.flatnonzero(alike)[np.argsort(first.conversation[alike], kind="stable")]
        first, steps = first.take(order), steps[order]
        _, starts = np.unique(first.conversation, return_index=True)
        return cls(
            names=names,
            tokens=first.tokens,
            steps=steps,
            workload=first.workload,
            slice=first.slice,
            prompt_tokens=first.prompt_tokens,
            starts=np.append(starts, len(first)),
        )

    @property
    def workloads(self) -> list[str]:
        """Names, sorted."""
        return sorted(set(self.workload.tolist()))

    def conversations(self, workload: str | None = None) -> Ints:
        """[c] indices of conversations, of one workload or all."""
        indices = np.arange(len(self.starts) - 1)
        return indices if workload is None else indices[self.workload[self.starts[:-1]] == workload]

    def lengths(self, workload: str | None = None) -> Floats:
        """[drafts] pooled acceptance lengths."""
        rows = np.ones(len(self.tokens), dtype=np.bool_) if workload is None else self.workload == workload
        found: Floats = self.tokens[rows].sum() / self.steps[rows].sum(axis=0)
        return found

    def rows(self, conversations: Ints) -> tuple[Ints, Ints]:
        """Rows of drawn conversations, and to which draw each belongs."""
        first, sizes = self.starts[conversations], np.diff(self.starts)[conversations]
        member = np.repeat(np.arange(len(conversations)), sizes)
        offset = np.arange(len(member)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return first[member] + offset, member


@dataclass(frozen=True)
class Sample:
    """Requests of one trial: what candidate and incumbent did on them."""

    tokens: Ints
    ours: Ints
    theirs: Ints
    conversation: Ints
    slice: npt.NDArray[np.str_]
    prompt_tokens: Ints

    def reports(self) -> tuple[EvalReport, EvalReport]:
        """As the evaluator would report them, candidate first."""
        return self._report(CANDIDATE, self.ours), self._report(INCUMBENT, self.theirs)

    def _report(self, draft: str, steps: Ints) -> EvalReport:
        columns = zip(
            self.tokens.tolist(),
            steps.tolist(),
            self.conversation.tolist(),
            self.slice.tolist(),
            self.prompt_tokens.tolist(),
            strict=True,
        )
        return report(draft, [_score(index, *values) for index, values in enumerate(columns)])

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean over requests of each one's acceptance length: what other tools decide on."""
        return float((self.tokens / self.ours).mean()), float((self.tokens / self.theirs).mean())


def _score(index: int, tokens: int, steps: int, conversation: int, slice: str, prompt_tokens: int) -> RequestScore:
    return RequestScore(
        request=f"r{index}",
        conversation=f"c{conversation}",
        slice=slice,
        tokens=tokens,
        verify_steps=steps,
        proposed=3 * steps,
        accepted=max(tokens - steps, 0),
        prompt_tokens=prompt_tokens,
    )


def draw(walked: Walked, requests: int, rng: np.random.Generator, mix: Mapping[str, float] | None = None) -> Ints:
    """Conversations drawn with replacement until they hold so many requests.

    Args:
        mix: share of the draws by workload; None draws all conversations alike.
    """
    if mix is None:
        drawn = rng.choice(walked.conversations(), requests)
    else:
        counts = rng.multinomial(requests, [mix[w] / sum(mix.values()) for w in mix])
        parts = [rng.choice(walked.conversations(w), count) for w, count in zip(mix, counts, strict=True)]
        drawn = rng.permutation(np.concatenate(parts))
    sizes = np.diff(walked.starts)[drawn]
    return drawn[: int(np.searchsorted(np.cumsum(sizes), requests)) + 1]


def sample(walked: Walked, conversations: Ints, taken: npt.NDArray[np.intp], given: npt.NDArray[np.intp]) -> Sample:
    """A trial: by conversation the index of the draft whose result the candidate has, and the incumbent's."""
    rows, member = walked.rows(conversations)
    return Sample(
        tokens=walked.tokens[rows],
        ours=walked.steps[rows, taken[member]],
        theirs=walked.steps[rows, given[member]],
        conversation=member,
        slice=walked.slice[rows],
        prompt_tokens=walked.prompt_tokens[rows],
    )


def exchanged(walked: Walked, conversations: Ints, rng: np.random.Generator) -> Sample:
    """An exact null: which draft is the candidate is tossed for each conversation."""
    taken = rng.integers(0, 2, len(conversations))
    return sample(walked, conversations, taken, 1 - taken)


def joined(samples: Sequence[Sample]) -> Sample:
    """Several samples as one, their conversations apart."""
    shifts = np.cumsum([0, *(int(s.conversation.max()) + 1 for s in samples)])
    return Sample(
        tokens=np.concatenate([s.tokens for s in samples]),
        ours=np.concatenate([s.ours for s in samples]),
        theirs=np.concatenate([s.theirs for s in samples]),
        conversation=np.concatenate([s.conversation + shift for s, shift in zip(samples, shifts, strict=False)]),
        slice=np.concatenate([s.slice for s in samples]),
        prompt_tokens=np.concatenate([s.prompt_tokens for s in samples]),
    )
