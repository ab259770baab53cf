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
_GROUPS = ("get_tp_group", "get_dp_group", "get_draft_dp_group", "get_draft_sp_group", "get_sp_ulysses_group")


def check_communicators(distributed: Any) -> str:
    """Refuse a layout in which ranks talk over more than the default group.

    A group of one rank never communicates, and gets no communicator: torch makes them at the first collective.

    Args:
        distributed: SpecForge's module of that name, initialised.

    Raises:
        SystemExit: names the group.
    """
    import torch.distributed as dist

    for name in (*_GROUPS, "get_sp_ring_group"):
        group = getattr(distributed, name)()
        if group is not None and group.size() > 1 and group.group_name != dist.group.WORLD.group_name:
            raise SystemExit(
                f"training: {name[4:]} has {group.size()} ranks and a communicator of its own beside the default one: "
                "collectives of several communicators deadlock on MI250 (ROCm/rccl issue 2191); train data-parallel"
            )
    return f"{ONE}, {dist.get_world_size()} ranks, {dist.get_backend()}"


def watch_communicators() -> None:
    """Have the groups checked as soon as SpecForge has made them."""
    from specforge import distributed

    make: Callable[..., None] = distributed.init_distributed

    def checked(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        line = check_communicators(distributed)
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
