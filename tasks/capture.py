"""Capture: how much of the traffic the replicas copy, as the drift gate has decided."""

from __future__ import annotations

from prefect import get_run_logger

from tasks.stage import stage
from tide import wiring
from tide.domain import DriftReport
from tide.errors import EngineError


@stage("set capture rate")
def set_capture_rate(report: DriftReport) -> None:
    """Set the rate that a drift report asks for on every replica; one that cannot be reached stops nothing.

    A replica that starts again captures at its own TIDE_SAMPLE_RATE until the next cycle.
    """
    rate = report.figures.get("capture_rate")
    if rate is None:
        return
    for replica in wiring.engines(wiring.settings()):
        try:
            replica.set_capture_rate(rate)
        except EngineError as error:
            get_run_logger().warning("capture rate not set: %s", error)
    get_run_logger().info("states of %.3g of the requests are captured from now on", rate)
