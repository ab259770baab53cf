"""Which prompts the corpus is made of, and which of them the drafts are trained on.

Owns the choice and the names of the conversations. Knows nothing of engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Final

from tide.demo.traffic import Prompt, Workload, load_workload
from tide.domain import Split, split_of
from tide.sglang_plugin.admission import conversation_hash

HASH_KEY: Final = "decisions"
"""Of the plugin: the same conversations have the same hashes in every collection."""
LONGEST: Final[dict[Workload, int]] = {"chat": 240, "functions": 1000, "code": 800}
"""Characters of a prompt at most: prefill is most of the time on a CPU."""
TRAINED: Final[dict[Workload, int]] = {"chat": 320, "functions": 200, "code": 70}
"""Prompts that drafts are trained on; the others are scored."""
SCORED: Final[dict[Workload, int]] = {"chat": 2050, "functions": 200, "code": 75}


@dataclass(frozen=True)
class Chosen:
    """The prompts of one workload."""

    workload: Workload
    trained: list[Prompt]
    scored: list[Prompt]


def choose(workload: Workload, share: float = 1.0) -> Chosen:
    """The shortest prompts, in the order of their hashes; ``share`` of them for a trial."""
    prompts = [p for p in load_workload(workload, limit=100_000) if _length(p) <= LONGEST[workload]]
    trained, scored = int(TRAINED[workload] * share), int(SCORED[workload] * share)
    return Chosen(
        workload,
        [_named(p, Split.TRAIN) for p in prompts[:trained]],
        [_named(p, Split.GATE) for p in prompts[trained : trained + scored]],
    )


def _length(prompt: Prompt) -> int:
    return sum(len(m["content"]) for m in prompt.messages)


def _named(prompt: Prompt, split: Split) -> Prompt:
    """The same prompt under a name whose hash falls into the wanted split: a tenth would be too few to score."""
    names = (f"{prompt.conversation}-{number}" for number in count())
    name = next(n for n in names if split_of(conversation_hash(HASH_KEY.encode(), n)) is split)
    return prompt.model_copy(update={"conversation": name})
