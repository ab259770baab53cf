"""Two ranks that talk over gloo as a training does, and hang: ``python -m tests.support.ranks``, under torchrun.

Rank 1 never comes to the second collective, as one whose kernel or network has died. As in SpecForge, SIGTERM is
handled in Python: a rank that waits inside a collective never gets to it.
"""

from __future__ import annotations

import signal
import sys
import time

import torch
import torch.distributed as dist

from tide.trainer.binding import end_with_parent


def main() -> None:
    """One step together; then one rank sleeps and the other waits for it."""
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    dist.init_process_group("gloo")
    for step in (1, 2):
        if step == 2 and dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            print(f"step {step}: {{'loss': 2.0}}", flush=True)


if __name__ == "__main__":
    main()
