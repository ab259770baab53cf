"""What hangs on a step's result inside SGLang: its rows, on their way from the device to the writer.

Owns SGLang's protocol for it (``copy_to_host`` on the copy stream, ``consume`` once the step's tokens are committed)
and giving the memory back, also when a result is never processed. Knows nothing of which rows are whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tide.sglang_plugin.records import Part, Span, StepRows
from tide.sglang_plugin.staging import HostRows, Stage

if TYPE_CHECKING:
    from tide.sglang_plugin.tap import Tap


def attach(output: Any, rows: DeviceRows) -> None:
    """Hang rows on SGLang's LogitsProcessorOutput, beside what others hung there."""
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    output.auxiliary_device_output = append_auxiliary_output(output.auxiliary_device_output, rows)


class DeviceRows:
    """Rows in a stage."""

    def __init__(self, tap: Tap, stage: Stage, spans: tuple[Span, ...]) -> None:
        self._tap, self.stage, self._spans = tap, stage, spans

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> CarriedRows:
        """Called by SGLang on its copy stream; the host waits for it with the step's one existing event."""
        rows: HostRows | None = None
        try:
            rows = self.stage.to_host(copy_tensor)
            if rows is None:
                self._tap.counters.drop("host_ring_full", sum(span.count for span in self._spans))
        except Exception as error:  # noqa: BLE001  process edge: an exception that leaves a hook ends the engine
            self._tap.switch_off("copy_to_host", error)
        return CarriedRows(self._tap, self.stage, rows, self._spans if rows is not None else ())


class CarriedRows:
    """Rows on the host once the step's copy is over, which it is when ``consume`` is called."""

    def __init__(self, tap: Tap, stage: Stage, rows: HostRows | None, spans: tuple[Span, ...]) -> None:
        self._tap, self._stage, self._rows, self.spans = tap, stage, rows, spans

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Called by SGLang once the step's tokens are committed."""
        self._tap.committed(self, batch, commits)

    def step(self, parts: tuple[Part, ...]) -> StepRows:
        """The accepted rows, for the writer."""
        assert self._rows is not None
        return StepRows(self._rows.aux, self._rows.last, parts, self._rows.release)

    def handed_over(self) -> None:
        """The writer has them, and releases them."""
        self._rows = None

    def __del__(self) -> None:
        # SGLang lets go of a result when it was processed, or dropped unread (an aborted batch): either way it is over.
        self._stage.release()
        if self._rows is not None:
            self._rows.release()
