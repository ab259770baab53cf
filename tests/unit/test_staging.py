"""Stages and host slots: fixed memory that comes back, and never a row that is another's."""

from __future__ import annotations

from types import SimpleNamespace as Some

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide.sglang_plugin.staging import LastStates, OwnStaging, RingStaging, fill, fill_at, staging_for

CPU = torch.device("cpu")
AUX, LAST = torch.zeros(1, 6, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16)


@st.composite
def selections(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ascending spans of at least one row, with and without gaps."""
    spans, at = [], 0
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 3))
        count = draw(st.integers(1, 4))
        spans.append((at, count))
        at += count
    return spans


@settings(deadline=None)
@given(selections(), st.sampled_from(["own", "ring"]))
def test_the_rows_of_the_spans_arrive_on_the_host_in_order(spans: list[tuple[int, int]], kind: str) -> None:
    source = torch.arange(40.0).to(torch.bfloat16)[:, None]
    aux, last = source.expand(-1, 6), source.expand(-1, 2)
    wanted = [float(row) for start, count in spans for row in range(start, start + count)]
    staging = OwnStaging() if kind == "own" else RingStaging(CPU, 4096)
    stage = staging.reserve(len(wanted), aux, last)
    assert stage is not None
    fill(stage.aux, aux, spans)
    fill(stage.last, last, spans)
    rows = stage.to_host(lambda tensor: tensor.clone())
    assert rows is not None
    assert rows.aux[:, 5].tolist() == wanted
    assert rows.last[:, 1].tolist() == wanted


def test_rows_at_indices_that_only_the_device_knows() -> None:
    source, target = torch.arange(8.0)[:, None].expand(-1, 2).contiguous(), torch.empty(3, 2)
    fill_at(target, source, torch.tensor([6, 0, 3]))
    assert target[:, 0].tolist() == [6.0, 0.0, 3.0]


def test_a_stage_survives_what_the_engine_writes_into_its_own_buffers_afterwards() -> None:
    source = torch.ones(4, 6, dtype=torch.bfloat16)
    stage = RingStaging(CPU, 4096).reserve(4, source, source)
    assert stage is not None
    fill(stage.aux, source, [(0, 4)])
    source.zero_()
    assert stage.aux.min() == 1


def test_no_free_stage_and_a_step_larger_than_a_stage_are_both_no_room() -> None:
    staging = RingStaging(CPU, 4096, stages=1)
    assert staging.reserve(300, AUX, LAST) is None
    stage = staging.reserve(4, AUX, LAST)
    assert stage is not None
    assert staging.reserve(4, AUX, LAST) is None
    stage.release()
    assert staging.reserve(4, AUX, LAST) is not None


@pytest.mark.parametrize(("rows", "fits"), [(256, True), (257, False)])
def test_a_stage_holds_exactly_its_bytes(rows: int, fits: bool) -> None:
    # 16 bytes a row in bfloat16
    assert (RingStaging(CPU, 4096).reserve(rows, AUX, LAST) is not None) is fits


def test_no_free_host_slot_is_no_room_until_the_writer_releases_one() -> None:
    staging = RingStaging(CPU, 4096, stages=2, host_slots=1)
    first, second = staging.reserve(1, AUX, LAST), staging.reserve(1, AUX, LAST)
    assert first is not None
    assert second is not None
    rows = first.to_host(torch.clone)
    assert rows is not None
    assert second.to_host(torch.clone) is None
    rows.release()
    assert second.to_host(torch.clone) is not None
    assert staging.free == (0, 0)


def test_a_cpu_allocates_and_anything_else_takes_a_ring() -> None:
    assert isinstance(staging_for(CPU, 4096), OwnStaging)


def test_captured_graphs_share_one_buffer_of_last_states() -> None:
    states, runner = LastStates(), Some(max_num_token=8)
    outputs = [Some(last_hidden_states=torch.full((n, 2), float(n))) for n in (8, 3)]
    for output in outputs:
        states.shrink(runner, output, None, output.last_hidden_states.shape[0])
    assert outputs[0].last_hidden_states.data_ptr() == outputs[1].last_hidden_states.data_ptr()
    assert outputs[1].last_hidden_states.shape == (3, 2)
    states.shrink(runner, Some(last_hidden_states=None), None, 3)
