"""Gate generations: when requests are used again, when a generation grows, and when a new one opens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from tests.support.signed import verdict_on
from tests.support.tiny import TARGET, request_info
from tide.domain import GateGeneration, Shard, Split, Verdict
from tide.promotion.families import family_of
from tide.promotion.gate import choose

A, B, C, D = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
Shards = list[tuple[str, Shard]]


def shard(closed_at: int, gate: int = 2, selection: int = 0) -> tuple[str, Shard]:
    """A held-out shard of so many requests, closed at a time that also names them."""
    infos = [request_info(f"g{closed_at}-{i}", Split.GATE) for i in range(gate)]
    infos += [request_info(f"s{closed_at}-{i}", Split.SELECTION) for i in range(selection)]
    made = Shard(
        name=f"{closed_at:064x}",
        split="held_out",
        target=TARGET,
        rows=9,
        size=1,
        requests=tuple(infos),
        opened_at=closed_at - 1.0,
        closed_at=float(closed_at),
    )
    return f"{closed_at}.safetensors", made


def shards(*closed: int) -> Shards:
    return [shard(at) for at in closed]


def pick(found: Shards, before: list[Verdict], candidate: str = A, incumbent: str = B, **changes: Any) -> Any:
    options: dict[str, Any] = {"requests": 4, "max_verdicts": 3} | changes
    generation, chosen = choose(found, before, candidate=candidate, incumbent=incumbent, **options)
    return generation, [int(s.closed_at) for _, s in chosen]


def judged(generation: GateGeneration, candidate: str = A, incumbent: str = B, outcome: Any = "reject") -> Verdict:
    verdict = verdict_on(candidate, incumbent, outcome)
    family = family_of(generation.id, incumbent)
    return verdict.model_copy(update={"gate": generation, "family": family, "target": TARGET})


def test_the_first_verdict_opens_a_generation_of_the_newest_requests() -> None:
    generation, chosen = pick(shards(1, 2, 3), [])
    assert chosen == [2, 3]
    assert (generation.first, generation.until, generation.requests, generation.used) == (2.0, 3.0, 4, 0)


def test_its_name_is_that_of_its_requests() -> None:
    assert pick(shards(1, 2, 3), [])[0].id == pick(shards(0, 2, 3), [])[0].id
    assert pick(shards(1, 2, 3), [])[0].id != pick(shards(1, 2, 3, 4), [])[0].id


def test_selection_requests_are_no_part_of_it() -> None:
    generation, chosen = pick([shard(1), shard(2, gate=0, selection=5), shard(3, selection=3)], [])
    assert (chosen, generation.requests) == ([1, 3], 4)


@pytest.mark.parametrize(("closed", "opens"), [((1, 2, 3), False), ((1, 2, 3, 4), True)])
def test_the_next_opens_with_as_many_wholly_new_requests_and_not_before(closed: tuple[int, ...], opens: bool) -> None:
    first, _ = pick(shards(1, 2), [])
    generation, chosen = pick(shards(*closed), [judged(first)], candidate=C)
    assert chosen == ([3, 4] if opens else [1, 2])
    assert (generation.id != first.id) == opens
    assert (generation.used, generation.missing) == ((0, 4) if opens else (1, 2))


def test_what_is_new_is_kept_back_so_that_frequent_verdicts_do_not_keep_the_next_from_opening() -> None:
    given: list[Verdict] = []
    names = []
    for now in range(2, 9):
        generation, _ = pick(shards(*range(1, now + 1)), given, candidate=f"{now:064x}")
        names.append(generation.id)
        given.append(judged(generation, candidate=f"{now:064x}"))
    assert [names.index(name) for name in names] == [0, 0, 2, 2, 4, 4, 6]


def test_a_candidate_that_was_not_settled_gets_what_came_since_as_one_more_attempt() -> None:
    first, _ = pick(shards(1, 2), [])
    generation, chosen = pick(shards(1, 2, 3), [judged(first, outcome="inconclusive")])
    assert chosen == [1, 2, 3]
    assert (generation.id, generation.until, generation.requests) == (first.id, 3.0, 6)
    assert pick(shards(1, 2, 3, 4, 5), [judged(first, outcome="inconclusive")])[1] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("outcome", ["reject", "promote"])
def test_a_candidate_that_was_settled_is_not_given_more(outcome: str) -> None:
    first, _ = pick(shards(1, 2), [])
    assert pick(shards(1, 2, 3), [judged(first, outcome=outcome)])[1] == [1, 2]


def test_after_a_generation_grew_the_next_holds_only_what_is_newer_than_its_growth() -> None:
    first, _ = pick(shards(1, 2), [])
    grown, _ = pick(shards(1, 2, 3), [before := judged(first, outcome="inconclusive")])
    given = [before, judged(grown)]
    assert pick(shards(1, 2, 3, 4), given, candidate=C)[1] == [1, 2, 3]
    assert pick(shards(1, 2, 3, 4, 5), given, candidate=C)[1] == [4, 5]


def test_a_generation_that_gave_its_verdicts_grows_no_more_and_says_what_is_missing() -> None:
    first, _ = pick(shards(1, 2), [])
    given = [judged(first, outcome="inconclusive")] * 3
    generation, chosen = pick(shards(1, 2, 3), given)
    assert (chosen, generation.used, generation.missing) == ([1, 2], 3, 2)
    assert pick(shards(1, 2, 3, 4), given)[1] == [3, 4]


def test_another_incumbent_starts_with_the_newest_requests() -> None:
    first, _ = pick(shards(1, 2), [])
    assert pick(shards(1, 2, 3), [judged(first)], candidate=C, incumbent=D)[1] == [2, 3]


def test_an_incumbent_that_came_back_finds_its_own_generation() -> None:
    first, _ = pick(shards(1, 2), [])
    other, _ = pick(shards(1, 2, 3), [judged(first)], candidate=C, incumbent=D)
    generation, chosen = pick(shards(1, 2, 3), [judged(first), judged(other, C, D)], candidate=C)
    assert (generation.id, chosen) == (first.id, [1, 2])


def test_verdicts_on_another_target_or_without_a_generation_are_no_precedent() -> None:
    first, _ = pick(shards(1, 2), [])
    foreign = judged(first).model_copy(update={"target": TARGET.model_copy(update={"weights": "9" * 64})})
    assert pick(shards(1, 2, 3), [foreign, verdict_on(C, B)])[1] == [2, 3]


def test_a_shard_that_arrives_late_joins_the_generation_it_was_closed_in() -> None:
    first, _ = pick(shards(1, 3), [])
    generation, chosen = pick(shards(1, 2, 3), [judged(first)], candidate=C)
    assert (generation.id, chosen, generation.requests) == (first.id, [1, 2, 3], 6)


def test_a_generation_whose_shards_are_gone_gives_way_to_what_is_there() -> None:
    first, _ = pick(shards(1, 2), [])
    assert pick(shards(3), [judged(first)], candidate=C)[1] == [3]


def test_nothing_to_judge_on_is_an_empty_choice() -> None:
    generation, chosen = pick([], [])
    assert (chosen, generation.requests) == ([], 0)


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([A, C]), st.sampled_from(["promote", "reject", "inconclusive"])),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@for_all(STEPS)
def test_generations_against_one_incumbent_never_share_a_request(steps: list[tuple[int, str, str]]) -> None:
    now, given, held = 2, [], {}
    for arrived, candidate, outcome in steps:
        now += arrived
        generation, chosen = pick(shards(*range(1, now + 1)), given, candidate=candidate)
        held.setdefault(generation.id, set()).update(chosen)
        given.append(judged(generation, candidate, outcome=outcome))
        assert generation.used == sum(v.gate.id == generation.id for v in given[:-1])
    everything = [at for closed in held.values() for at in closed]
    assert len(everything) == len(set(everything))
