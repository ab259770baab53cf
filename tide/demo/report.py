"""What the demo reports: ``report.json``, a table to read, and a picture of acceptance over time.

Owns the report's fields and the drawing. Knows nothing of how the figures came about.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tide.demo.load import Served
from tide.demo.measure import ArmResult, ratios
from tide.domain import DraftModel, DriftReport, Promotion, Snapshot, Value, Verdict
from tide.files import write_durably

REFERENCE_TOKENS_PER_S = 18.8
"""Plain serving at concurrency 1 on the machine that time limits are stated for."""
ROLLING = 20
FIRST = 5
"""Requests before the first point of a stretch: the mean of fewer says nothing."""


class Cycle(Value):
    """One cycle: what was seen, made, decided and done."""

    snapshot: Snapshot
    drift: DriftReport | None
    candidate: DraftModel
    verdict: Verdict
    promotion: Promotion | None
    reused: bool = False
    """True when the draft was trained by an earlier run of the demo and taken from its cache."""
    seconds: float


class Mark(Value):
    """Something to mark on the picture."""

    at: float
    label: str


class Report(Value):
    """The whole report."""

    wall_s: float
    machine: dict[str, Any]
    reference_speed_ratio: float | None
    wall_at_reference_s: float | None
    """Wall time scaled to the reference machine: an estimate, by plain serving at concurrency 1."""
    date: str
    steps_s: dict[str, float]
    """Seconds of each step of the story."""
    cycles: tuple[Cycle, ...]
    held_out: dict[str, ArmResult]
    ratios: dict[str, Any]
    capture: dict[str, Any]
    swap_s: float | None
    swap_failed_requests: int
    fast: bool


def machine() -> dict[str, Any]:
    """What this machine is."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def compared(results: dict[str, ArmResult]) -> dict[str, Any]:
    """The ratios a reader asks for; throughput by concurrency."""
    return {
        "acceptance_length_adapted_over_static": results["adapted"].acceptance_length
        / results["static"].acceptance_length,
        "throughput_adapted_over_static": ratios(results, "adapted", "static"),
        "throughput_adapted_over_no_speculation": ratios(results, "adapted", "no_speculation"),
        "throughput_static_over_no_speculation": ratios(results, "static", "no_speculation"),
    }


def write(report: Report, folder: Path, served: Sequence[Served], marks: Sequence[Mark]) -> tuple[Path, Path]:
    """Write ``report.json`` and ``acceptance.png``; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    path, picture = folder / "report.json", folder / "acceptance.png"
    write_durably(path, report.model_dump_json(indent=2).encode())
    draw(picture, served, marks)
    return path, picture


def table(report: Report) -> str:
    """The measured figures as text."""
    lines = [f"{'':<16} {'acceptance length':>18} {'tok/s at 1':>12} {'tok/s at 4':>12}"]
    for name, arm in report.held_out.items():
        rates = [f"{arm.output_tokens_per_s[c]:>12.1f}" for c in sorted(arm.output_tokens_per_s, key=int)]
        lines.append(f"{name.replace('_', ' '):<16} {arm.acceptance_length:>18.3f} {' '.join(rates)}")
    for name, value in report.ratios.items():
        text = ", ".join(f"{v:.2f} at {c}" for c, v in value.items()) if isinstance(value, dict) else f"{value:.2f}"
        lines.append(f"{name.replace('_', ' ')}: {text}")
    return "\n".join(lines)


def draw(path: Path, served: Sequence[Served], marks: Sequence[Mark]) -> None:
    """Acceptance length over time (rolling over requests), coloured by workload, promotions marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    start = min((s.at for s in served), default=0.0)
    colours: dict[str, str] = {}
    for own in _stretches(served, marks):
        workload = own[0].workload
        label = None if workload in colours else f"traffic {workload} the shift"
        colour = colours.setdefault(workload, f"C{len(colours)}")
        axes.plot(*_rolling(own, start), marker=".", linewidth=1.2, color=colour, label=label)
    for mark in marks:
        axes.axvline((mark.at - start) / 60, color="0.4", linestyle="--", linewidth=1)
        where = {"transform": axes.get_xaxis_transform(), "va": "bottom", "rotation": 90, "ha": "right"}
        axes.text((mark.at - start) / 60, 0.02, f"{mark.label} ", fontsize=9, color="0.3", **where)
    axes.set(xlabel="minutes", ylabel=f"acceptance length, last {ROLLING} requests", title="TIDE on live traffic")
    if colours:
        axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _stretches(served: Sequence[Served], marks: Sequence[Mark]) -> list[list[Served]]:
    """Measured requests in order of time, cut where the workload changes and at each mark.

    A rolling mean across a promotion would hide it.
    """
    found: dict[tuple[int, str], list[Served]] = {}
    for one in sorted((s for s in served if s.generation.verify_steps), key=lambda s: s.at):
        epoch = sum(mark.at <= one.at for mark in marks)
        found.setdefault((epoch, one.workload), []).append(one)
    return list(found.values())


def _rolling(served: Sequence[Served], start: float) -> tuple[list[float], list[float]]:
    times, values = [], []
    for end in range(min(FIRST, len(served)), len(served) + 1):
        window = served[max(0, end - ROLLING) : end]
        steps = sum(s.generation.verify_steps or 0 for s in window)
        times.append((window[-1].at - start) / 60)
        values.append(sum(s.generation.completion_tokens for s in window) / steps)
    return times, values
