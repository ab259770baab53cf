"""A rank talks over one communicator, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from tide.trainer.rank import one_communicator

NAMES = ("tp", "dp", "draft_dp", "draft_sp", "sp_ulysses", "sp_ring")


class Group:
    """A process group as far as it is looked at."""

    def __init__(self, name: str, size: int) -> None:
        self.group_name, self._size = name, size

    def size(self) -> int:
        return self._size


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The default group, of this process alone, which says that there are eight ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 8)
    yield dist.group.WORLD
    dist.destroy_process_group()


def layout(**changes: Any) -> Any:
    """A module like SpecForge's with single-rank groups, some of them changed."""
    module: Any = ModuleType("groups")
    for name in NAMES:
        setattr(module, f"_{name.upper()}_GROUP", changes.get(name, Group("alone", 1)))
        setattr(module, f"get_{name}_group", partial(getattr, module, f"_{name.upper()}_GROUP"))
    return module


def test_groups_of_one_rank_and_the_default_group_are_one_communicator(world: Any) -> None:
    everybody = Group(world.group_name, 8)
    told = one_communicator(layout(dp=everybody, draft_dp=everybody, sp_ring=None))
    assert told == "tide: one communicator, 8 ranks, gloo"


@pytest.mark.parametrize("name", NAMES)
def test_another_group_of_all_ranks_becomes_the_default_one(world: Any, name: str) -> None:
    groups = layout(**{name: Group("mesh", 8)})
    one_communicator(groups)
    assert getattr(groups, f"get_{name}_group")() is world


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_some_ranks_is_refused_by_name(name: str) -> None:
    with pytest.raises(SystemExit, match=f"the group {name} has 2 ranks .*rccl issue 2191"):
        one_communicator(layout(**{name: Group("some", 2)}))


@pytest.mark.usefixtures("world")
def test_a_specforge_that_keeps_its_groups_elsewhere_is_refused() -> None:
    groups = layout(dp=Group("mesh", 8))
    groups.get_dp_group = lambda: Group("mesh", 8)
    with pytest.raises(SystemExit, match=r"written for specforge 0\.2\.0"):
        one_communicator(groups)
