"""torchrun, bound to the process that started it: ``python -m tide.trainer.torchrun --standalone ...``

Owns that no rank outlives torchrun and torchrun not its parent, even by SIGKILL, and that a stop that was asked for
ends with the exit code of one. torchrun gives each rank a session of its own, so no signal to a group would reach them.
Everything else is torchrun's own.
"""

from __future__ import annotations

import os
import sys

from tide.trainer.binding import PARENT, end_with_parent


def main() -> int:
    """The command line of torchrun."""
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
