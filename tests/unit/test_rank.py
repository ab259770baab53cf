"""A rank talks over one communicator, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tide.trainer.rank import check_communicators

NAMES = ("tp", "dp", "draft_dp", "draft_sp", "sp_ulysses", "sp_ring")


@pytest.fixture
def world() -> Iterator[Any]:
    """The default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def group(name: str, size: int) -> Any:
    return SimpleNamespace(group_name=name, size=lambda: size)


def layout(**changes: Any) -> Any:
    """SpecForge's module with single-rank groups, some of them changed."""
    groups = dict.fromkeys(NAMES, group("alone", 1)) | changes
    return SimpleNamespace(**{f"get_{name}_group": lambda found=found: found for name, found in groups.items()})


def test_groups_of_one_rank_and_the_default_group_are_one_communicator(world: Any) -> None:
    everybody = group(world.group_name, 8)
    assert check_communicators(layout(dp=everybody, draft_dp=everybody, sp_ring=None)) == (
        "tide: one communicator, 1 ranks, gloo"
    )


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", NAMES)
def test_a_second_group_of_several_ranks_is_refused_by_name(name: str) -> None:
    with pytest.raises(SystemExit, match=f"{name}_group has 2 ranks .* rccl issue 2191"):
        check_communicators(layout(**{name: group("another", 2)}))
