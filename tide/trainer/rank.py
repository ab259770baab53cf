"""One rank of a training run: the unmodified ``specforge`` command, ``python -m tide.trainer.rank train -c run.yaml``.

Owns that the rank ends with the process that started it, the replacements that a CPU takes, and that all ranks talk
over ONE communicator: on MI250 collectives of two or three deadlock (ROCm/rccl issue 2191).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tide.trainer.binding import end_with_parent

ONE = "tide: one communicator"
"""Begin of the line that rank 0 prints once its process groups were looked at."""
_GROUPS = ("tp", "dp", "draft_dp", "draft_sp", "sp_ulysses", "sp_ring")


def one_communicator(distributed: Any) -> str:
    """Have all ranks talk over the default group, and refuse a layout in which they cannot.

    A group of one rank never communicates, and gets no communicator: torch makes them at the first collective. One of
    all ranks is the default group under another name; whether torch made it so depends on its version.

    Args:
        distributed: SpecForge's module of that name, initialised.

    Raises:
        SystemExit: names the group.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    for name in _GROUPS:
        group = getattr(distributed, f"get_{name}_group")()
        if group is None or group.size() == 1 or group.group_name == world.group_name:
            continue
        if group.size() != dist.get_world_size():
            raise SystemExit(
                f"training: the group {name} has {group.size()} ranks and a communicator of its own beside the default "
                "one: collectives of several deadlock on MI250 (ROCm/rccl issue 2191); train data-parallel only"
            )
        setattr(distributed, f"_{name.upper()}_GROUP", world)
        if getattr(distributed, f"get_{name}_group")() is not world:
            raise SystemExit(f"{distributed.__name__}: _{name.upper()}_GROUP is gone; written for specforge 0.2.0")
    return f"{ONE}, {dist.get_world_size()} ranks, {dist.get_backend()}"


def watch_communicators() -> None:
    """Have the groups made one as soon as SpecForge has made them."""
    from specforge import distributed

    make: Callable[..., None] = distributed.init_distributed

    def checked(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        line = one_communicator(distributed)
        if os.environ.get("RANK", "0") == "0":
            print(line, flush=True)  # noqa: T201 - what is read of a rank is its output

    distributed.init_distributed = checked


def main() -> int:
    """The command line of SpecForge."""
    end_with_parent()
    if os.environ.get("SPECFORGE_DEVICE") == "cpu":
        from tide.trainer import specforge_cpu

        # Compiling for a CPU takes longer than a whole run of ours.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        specforge_cpu.install()
    watch_communicators()
    from specforge.cli import main as specforge

    return int(specforge(sys.argv[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
