"""The whole of TIDE on one machine: started in order, recorded, and ended exactly.

Owns the commands on a stack and the order in which it is ended; start.py has the order of starting. Knows nothing of
cycles. Everything listens on 127.0.0.1. A rollout restarts the replica by ``python -m infra.local restart-engine``.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra import ports, prefect, processes, sglang
from infra.lakefs.server import NAME as LAKEFS
from infra.processes import Report
from infra.sglang import SglangOptions
from infra.stack import PartStatus, Stack, exclusive, forget, load, part_statuses, read_env, save
from infra.start import Start, Wanted
from tide.errors import ServiceError, TideError
from tide.names import require_digest

__all__ = [
    "PartStatus",
    "Stack",
    "Wanted",
    "down",
    "end_pipeline",
    "load",
    "plain_engine",
    "read_env",
    "restart_engine",
    "running",
    "status",
    "up",
    "watch",
]

PLAIN_ENGINE = "sglang-plain"
ENGINES = (sglang.NAME, PLAIN_ENGINE)
STOP_ORDER = (*map(prefect.worker_name, prefect.POOLS), *ENGINES, prefect.SERVER, LAKEFS)
"""Workers first: once their server is gone they ignore SIGTERM, and their flows cannot report how they ended."""
STOP_GRACE_S = 20.0
"""Room for requests in flight, for the plugin to close its shard, for flows to report."""


def up(home: Path, wanted: Wanted | None = None, *, report: Report = print, foreground: bool = False) -> Stack:
    """Start lakeFS, Prefect, SGLang and the workers, and wait until all are ready; 30 s on an idle machine.

    Args:
        foreground: the kernel ends the parts when the calling process dies; see ``running``.

    Raises:
        ServiceError: a stack runs here already, a port is busy, or a part did not become ready. What was started by
            then has been ended again; so it is on an interrupt.
    """
    home = home.absolute()
    began = time.monotonic()
    with exclusive(home):
        _refuse_running(home)
        try:
            stack = Start(home, wanted or Wanted(), report, foreground).run()
        except BaseException:
            # Whatever it was, an interrupt included: nothing half-started stays behind.
            report("start failed: ending what was started")
            _stop(home, report)
            raise
    report(f"ready in {time.monotonic() - began:.0f} s")
    return stack


def down(home: Path, *, report: Report = print) -> list[str]:
    """End exactly what ``up`` started, in order. Returns the names of the parts that ran; again is harmless.

    Raises:
        ServiceError: another command starts or stops this stack now, or a process does not end.
    """
    home = home.absolute()
    with exclusive(home, wait_s=60):
        return _stop(home, report)


def status(home: Path) -> list[PartStatus]:
    """State, address and memory of every part."""
    return part_statuses(home.absolute())


def restart_engine(home: Path, draft: Path | None, *, report: Report = print, **changes: Any) -> Stack:
    """Serve with another draft, or other options, by a restart on the same address; requests in flight are drained.

    Args:
        draft: folder of the draft; None: without speculation.
        changes: fields of SglangOptions.

    Raises:
        ServiceError: no stack, or the engine did not become ready: it is then down, and the earlier options are kept.
        ConfigError: the draft folder is missing; the engine was not touched.
    """
    home = home.absolute()
    with exclusive(home, wait_s=60):
        stack = load(home)
        options = stack.engine.model_copy(
            update={"draft": draft, "speculative": draft is not None, "untrained": False, **changes}
        )
        options = SglangOptions.model_validate(options.model_dump())
        options.check_folders()
        engine = processes.find(home, sglang.NAME)
        if engine is not None:
            engine.stop(STOP_GRACE_S)
            ports.wait_free(options.port, STOP_GRACE_S)
        engine = sglang.launch(home, options)
        try:
            seconds = sglang.wait_ready(engine, options, report)
        except BaseException:
            # Down, and known to be: whoever watches the stack must not take it for a crash while a rollout repairs it.
            engine.stop()
            raise
        report(f"{sglang.NAME} ready in {seconds:.0f} s, draft {draft.name[:12] if draft else 'none'}")
        stack = Stack(home, stack.env, options)
        save(stack)
    return stack


def start_plain_engine(home: Path, report: Report = print) -> str:
    """A second engine of the same target without speculation, tap or swap, to compare with; returns its address.

    It ends with the stack.

    Raises:
        ServiceError: no stack, or it did not become ready.
    """
    home = home.absolute()
    port = ports.free_port()
    changes: dict[str, Any] = {
        "speculative": False,
        "draft": None,
        "spool": None,
        "draft_dir": None,
        "plugin_env": {},
        "port": port,
    }
    options = SglangOptions.model_validate({**load(home).engine.model_dump(), **changes})
    sglang.wait_ready(sglang.launch(home, options, name=PLAIN_ENGINE), options, report)
    return options.url


@contextlib.contextmanager
def plain_engine(home: Path, report: Report = print) -> Iterator[str]:
    """The address of an engine as ``start_plain_engine`` starts it, for as long as the block lasts."""
    try:
        yield start_plain_engine(home, report)
    finally:
        if process := processes.find(home.absolute(), PLAIN_ENGINE):
            process.stop(STOP_GRACE_S)


def end_pipeline(home: Path, report: Report = print) -> None:
    """End everything but the engines, which have the machine to themselves then; ``down`` ends the rest.

    Raises:
        ServiceError: another command starts or stops this stack now, or a process does not end.
    """
    home = home.absolute()
    with exclusive(home, wait_s=60):
        for name in (n for n in STOP_ORDER if n not in ENGINES):
            if process := processes.find(home, name):
                process.stop(STOP_GRACE_S)
                report(f"{name}: ended, for the measured phase")


@contextlib.contextmanager
def running(home: Path, wanted: Wanted | None = None, *, report: Report = print) -> Iterator[Stack]:
    """A stack for as long as the block lasts: ended on the way out, also by Ctrl-C, SIGTERM or a closed terminal."""
    with _signals_interrupt():
        stack = up(home, wanted, report=report, foreground=True)
        try:
            yield stack
        finally:
            down(home, report=report)


def watch(home: Path, poll_s: float = 1.0) -> None:
    """Return when the stack was stopped by another command.

    Raises:
        ServiceError: a part died by itself; the message has the end of its log.
    """
    suspects: set[str] = set()
    while True:
        parts = status(home)
        if all(part.state in ("stopped", "external") for part in parts):
            return
        died = {part.name for part in parts if part.state == "died"}
        # Twice in a row: a part that is being stopped looks dead for a moment before its record goes.
        if confirmed := died & suspects:
            name = min(confirmed)
            process = processes.find(home.absolute(), name)
            raise ServiceError(f"{name} died:\n{process.log_tail() if process else ''}")
        suspects = died
        time.sleep(poll_s)


def _refuse_running(home: Path) -> None:
    if alive := [part.name for part in part_statuses(home) if part.state == "running"]:
        raise ServiceError(f"a stack of {home} runs already ({', '.join(alive)}); end it with `tide down`")
    # What died by itself may have left children behind.
    _stop(home, lambda _: None)


def _stop(home: Path, report: Report) -> list[str]:
    ended = processes.stop_all(home, STOP_ORDER, STOP_GRACE_S, report)
    forget(home)
    return ended


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    # An ignored one stays so: whoever started this under nohup meant it.
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """Restart the engine with a draft of the stack's draft folder, by digest."""
    parser = argparse.ArgumentParser(prog="python -m infra.local", description=main.__doc__)
    parser.add_argument("command", choices=["restart-engine"])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--steps", type=int, default=None, help="draft steps from now on; unchanged when not given")
    wanted = parser.parse_args()
    changes = {} if wanted.steps is None else {"steps": wanted.steps, "draft_tokens": wanted.steps + 1}
    try:
        draft = wanted.home / "drafts" / require_digest(wanted.draft, "draft digest")
        restart_engine(wanted.home, draft, **changes)
    except TideError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
