"""The tap: which row belongs to which token, and that none of its failures reaches the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Some
from typing import Any

import pytest
import torch

from tide.sglang_plugin.admission import Admitter, RequestFacts
from tide.sglang_plugin.counters import CaptureCounters
from tide.sglang_plugin.inbox import Inbox
from tide.sglang_plugin.records import DropAll, FinishedRequest, StepRows
from tide.sglang_plugin.staging import RingStaging, Staging
from tide.sglang_plugin.tap import Tap

HIDDEN = 2
WIDTH = 4
CHAIN, TREE = Some(topk=1), Some(topk=2)


class Rig:
    """A tap whose inbox is read by hand."""

    def __init__(self, *, prompt_rows: int = 1000, queue_bytes: int = 1 << 20, staging: Staging | None = None) -> None:
        self.counters, self.inbox = CaptureCounters(), Inbox(queue_bytes)
        self.served = ("draft-a", 0)
        self.tap = Tap(
            admitter=Admitter(b"key", sample_rate=1.0, min_tokens=2, max_tokens=1000),
            inbox=self.inbox,
            counters=self.counters,
            prompt_rows=prompt_rows,
            draft=lambda: self.served,
            draft_tokens=WIDTH,
            staging=staging,
        )

    def arrive(self, rid: str, prompt: int, **params: Any) -> Any:
        self.tap.arrived(rid, lambda _: RequestFacts(rid, range(prompt), max_new_tokens=16, **params))
        return request(rid, prompt)

    def items(self) -> list[Any]:
        return list(iter(lambda: self.inbox.take(0.0), None))

    def rows(self) -> dict[int, dict[int, float]]:
        """Value of each row that reached the inbox, by serial and position."""
        found: dict[int, dict[int, float]] = {}
        for step in self.items():
            assert isinstance(step, StepRows)
            for part in step.parts:
                for i in range(part.count):
                    assert step.aux[part.row + i, 0] == step.last[part.row + i, 0]
                    found.setdefault(part.serial, {})[part.position + i] = float(step.last[part.row + i, 0])
        return found


def request(rid: str, prompt: int) -> Any:
    return Some(
        rid=rid,
        origin_input_ids=list(range(prompt)),
        output_ids_through_stop=[],
        is_retracted=False,
        finished_reason=None,
        finished=lambda: False,
        spec_verify_ct=0,
        spec_num_correct_drafts=0,
        cached_tokens=0,
        sampling_params=Some(top_k=1, temperature=1.0),
    )


def output(values: Sequence[float]) -> Any:
    last = torch.tensor(values).reshape(-1, 1)
    return Some(
        logits_output=Some(
            hidden_states=last.expand(-1, 3 * HIDDEN).clone(),
            last_hidden_states=last.expand(-1, HIDDEN).clone(),
            auxiliary_device_output=None,
        ),
        speculative_num_draft_tokens=WIDTH,
        accept_index=None,
    )


def prefill(reqs: list[Any], prefix: list[int], extend: list[int]) -> Any:
    return Some(reqs=reqs, prefix_lens=prefix, extend_lens=extend, forward_mode=Some(is_extend=lambda: True))


def verify(*reqs: Any) -> Any:
    return Some(reqs=list(reqs), forward_mode=Some(is_idle=lambda: False))


def commit(index: int, count: int) -> Any:
    return Some(output_index=index, token_ids=tuple(range(count)))


def consume(result: Any, batch: Any, commits: list[Any]) -> None:
    carried = result.logits_output.auxiliary_device_output
    if carried is not None:
        carried.copy_to_host(lambda tensor: tensor).consume(batch, commits)


def test_prefill_rows_of_a_batch_land_at_their_positions() -> None:
    rig = Rig()
    a, b = rig.arrive("a", 5), rig.arrive("b", 3)
    result, batch = output([10, 11, 12, 13, 14, 20, 21, 22]), prefill([a, b], [0, 0], [5, 3])
    rig.tap.prefilled(batch, result)
    consume(result, batch, [commit(0, 1), commit(0, 1)])
    assert rig.rows() == {1: {i: 10.0 + i for i in range(5)}, 2: {i: 20.0 + i for i in range(3)}}


def test_chunks_of_a_prompt_and_a_cached_prefix_keep_absolute_positions() -> None:
    rig = Rig()
    a = rig.arrive("a", 9)
    for prefix, extend, committed in ((2, 4, None), (6, 3, commit(0, 1))):
        result, batch = output([100 + prefix + i for i in range(extend)]), prefill([a], [prefix], [extend])
        rig.tap.prefilled(batch, result)
        consume(result, batch, [committed])
    assert rig.rows() == {1: {p: 100.0 + p for p in range(2, 9)}}


def test_only_the_last_prompt_rows_of_a_training_conversation_are_taken() -> None:
    rig = Rig(prompt_rows=2)
    held, train = None, None
    for i in range(200):
        req = rig.arrive(f"r{i}", 6, custom_params={"tide": {"conversation": str(i)}})
        split = rig.tap._open[req.rid].admission.split
        assert split is not None
        held, train = (req, train) if split.folder == "held_out" else (held, req)
    assert held is not None
    assert train is not None
    result, batch = output(list(range(12))), prefill([held, train], [0, 0], [6, 6])
    rig.tap.prefilled(batch, result)
    consume(result, batch, [commit(0, 1), commit(0, 1)])
    serials = [rig.tap._open[r.rid].serial for r in (held, train)]
    assert rig.rows() == {serials[0]: {i: float(i) for i in range(6)}, serials[1]: {4: 10.0, 5: 11.0}}


def test_accepted_rows_of_a_chain_are_the_first_of_each_block() -> None:
    rig = Rig()
    a, b = rig.arrive("a", 5), rig.arrive("b", 3)
    result, batch = output([10, 11, 12, 13, 20, 21, 22, 23]), verify(a, b)
    rig.tap.verified(batch, result, CHAIN)
    consume(result, batch, [commit(1, 3), commit(4, 1)])
    assert rig.rows() == {1: {5: 10.0, 6: 11.0, 7: 12.0}, 2: {6: 20.0}}


def test_a_request_that_is_not_captured_costs_no_row_and_shifts_none() -> None:
    rig = Rig()
    out, a = rig.arrive("out", 4, no_logs=True), rig.arrive("a", 5)
    result, batch = output([0, 1, 2, 3, 10, 11, 12, 13]), verify(out, a)
    rig.tap.verified(batch, result, CHAIN)
    assert result.logits_output.auxiliary_device_output.stage.aux.shape[0] == WIDTH
    consume(result, batch, [commit(1, 4), commit(1, 2)])
    assert rig.rows() == {2: {5: 10.0, 6: 11.0}}


def test_accepted_rows_of_a_tree_follow_its_path() -> None:
    rig = Rig()
    out, a = rig.arrive("out", 4, no_logs=True), rig.arrive("a", 5)
    result, batch = output([0, 1, 2, 3, 10, 11, 12, 13]), verify(out, a)
    result.accept_index = torch.tensor([[0, 1, 2], [4, 6, -1]])
    # SGLang has compacted the captured layers to the accepted path, but not the last hidden states.
    result.logits_output.hidden_states[5] = result.logits_output.hidden_states[6].clone()
    rig.tap.verified(batch, result, TREE)
    consume(result, batch, [commit(1, 3), commit(1, 2)])
    assert rig.rows() == {2: {5: 10.0, 6: 12.0}}


def test_a_finished_request_that_comes_by_once_more_adds_nothing() -> None:
    rig = Rig()
    a = rig.arrive("a", 5)
    result, batch = output([10, 11, 12, 13]), verify(a)
    rig.tap.verified(batch, result, CHAIN)
    consume(result, batch, [None])
    assert rig.rows() == {}
    assert rig.counters.snapshot()["dropped"] == {}


def test_rows_at_an_unexpected_position_are_dropped_and_counted() -> None:
    rig = Rig()
    a = rig.arrive("a", 5)
    result, batch = output([10, 11, 12, 13]), prefill([a], [0], [4])
    rig.tap.prefilled(batch, result)
    consume(result, batch, [commit(0, 1)])
    assert rig.rows() == {}
    assert rig.counters.snapshot()["dropped"] == {"position_mismatch": 4}


def test_rows_of_a_retracted_prefill_are_not_a_loss() -> None:
    rig = Rig()
    a = rig.arrive("a", 4)
    result, batch = output([10, 11, 12, 13]), prefill([a], [0], [4])
    rig.tap.prefilled(batch, result)
    a.is_retracted = True
    consume(result, batch, [None])
    assert (rig.rows(), rig.counters.snapshot()["dropped"]) == ({}, {})


@pytest.mark.parametrize("missing", ["hidden_states", "last_hidden_states"])
def test_fewer_rows_than_tokens_are_never_guessed_at(missing: str) -> None:
    rig = Rig()
    a = rig.arrive("a", 5)
    result, batch = output([10, 11, 12, 13]), prefill([a], [0], [5])
    rig.tap.prefilled(batch, result)
    result = output([10, 11, 12, 13, 14])
    setattr(result.logits_output, missing, None)
    rig.tap.prefilled(batch, result)
    assert result.logits_output.auxiliary_device_output is None
    assert set(rig.counters.snapshot()["dropped"]) == {"short_states", "no_states"}


def test_a_full_queue_drops_rows_and_counts_them() -> None:
    rig = Rig(queue_bytes=10)
    a = rig.arrive("a", 5)
    result, batch = output([10, 11, 12, 13, 14]), prefill([a], [0], [5])
    rig.tap.prefilled(batch, result)
    consume(result, batch, [commit(0, 1)])
    assert rig.rows() == {}
    assert rig.counters.snapshot()["dropped"] == {"queue_full": 5}


def test_own_memory_is_taken_before_the_engine_reuses_its_buffers() -> None:
    rig = Rig()
    a = rig.arrive("a", 5)
    result, batch = output([10, 11, 12, 13]), verify(a)
    rig.tap.verified(batch, result, CHAIN)
    result.logits_output.hidden_states.fill_(-1)
    result.logits_output.last_hidden_states.fill_(-1)
    consume(result, batch, [commit(1, 4)])
    assert rig.rows() == {1: {5: 10.0, 6: 11.0, 7: 12.0, 8: 13.0}}


def test_the_end_of_a_request_carries_its_counters_and_its_draft() -> None:
    rig = Rig()
    a = rig.arrive("a", 3)
    a.output_ids_through_stop, a.spec_verify_ct, a.spec_num_correct_drafts = [7, 8, 9], 2, 1
    a.finished, a.finished_reason = lambda: True, Some(to_json=lambda: {"type": "stop"})
    rig.tap.streamed([a, a])
    (end,) = rig.items()
    assert isinstance(end, FinishedRequest)
    assert (list(end.ids), end.prompt_tokens, end.finish_reason) == ([0, 1, 2, 7, 8, 9], 3, "stop")
    assert (end.verify_steps, end.proposed, end.accepted) == (2, 6, 1)
    assert (end.temperature, end.sampling, end.draft) == (0.0, "greedy", "draft-a")


def test_a_request_without_a_verify_step_is_unmeasured_not_zero() -> None:
    rig = Rig()
    rig.tap.aborted(rig.arrive("a", 3))
    (end,) = rig.items()
    assert (end.verify_steps, end.proposed, end.accepted, end.finish_reason) == (None, None, None, "abort")


def test_a_request_served_by_two_drafts_is_marked_mixed() -> None:
    rig = Rig()
    a = rig.arrive("a", 3)
    rig.served = ("draft-b", 1)
    rig.tap.aborted(a)
    (end,) = rig.items()
    assert end.draft == "mixed"


def test_an_exception_in_the_tap_switches_it_off_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    a = rig.arrive("a", 5)
    broken = prefill([a], [0], [None])  # type: ignore[list-item]
    rig.tap.prefilled(broken, output([1]))
    assert not rig.tap.enabled
    assert rig.items() == [DropAll("tap_off")]
    rig.tap.prefilled(broken, output([1]))
    rig.tap.streamed([object()])
    assert len([r for r in caplog.records if "capture is off" in r.getMessage()]) == 1
    assert rig.counters.snapshot()["enabled"] == 0


def test_a_failing_copy_to_the_host_reaches_nobody() -> None:
    rig = Rig()
    a = rig.arrive("a", 5)
    result, batch = output([10, 11, 12, 13]), verify(a)
    rig.tap.verified(batch, result, CHAIN)

    def no_memory(_tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of pinned memory")

    result.logits_output.auxiliary_device_output.copy_to_host(no_memory).consume(batch, [commit(1, 4)])
    assert not rig.tap.enabled


def test_a_changed_target_ends_capture_because_its_identity_is_unknown() -> None:
    rig = Rig()
    rig.arrive("a", 5)
    rig.tap.target_changed("UpdateWeightFromDiskReqInput")
    assert not rig.tap.enabled
    assert DropAll("target_update") in rig.items()


def test_rows_that_go_through_a_ring_of_stages_and_host_slots_are_the_same_rows() -> None:
    rig = Rig(staging=RingStaging(torch.device("cpu"), 4096))
    a = rig.arrive("a", 5)
    for step in range(20):  # far more steps than stages: each must come back
        result, batch = output([step * 10.0 + i for i in range(WIDTH)]), verify(a)
        rig.tap.verified(batch, result, CHAIN)
        consume(result, batch, [commit(step + 1, 1)])
        result.logits_output.auxiliary_device_output = None
        (item,) = rig.items()
        assert float(item.last[item.parts[0].row, 0]) == step * 10.0
        item.release()
    assert rig.counters.snapshot()["dropped"] == {}


def test_a_step_without_a_free_stage_is_dropped_and_counted_and_a_result_never_processed_gives_its_stage_back() -> None:
    staging = RingStaging(torch.device("cpu"), 4096, stages=1)
    rig = Rig(staging=staging)
    a = rig.arrive("a", 5)
    held, lost = output([1.0] * WIDTH), output([2.0] * WIDTH)
    rig.tap.verified(verify(a), held, CHAIN)
    rig.tap.verified(verify(a), lost, CHAIN)
    assert lost.logits_output.auxiliary_device_output is None
    assert rig.counters.snapshot()["dropped"] == {"stage_full": WIDTH}
    held.logits_output.auxiliary_device_output.copy_to_host(lambda tensor: tensor)  # and nobody consumes it
    assert staging.free == (1, 6)


def test_a_step_without_a_free_host_slot_is_dropped_and_counted() -> None:
    rig = Rig(staging=RingStaging(torch.device("cpu"), 4096, host_slots=1))
    a = rig.arrive("a", 5)
    for index in (1, 2):
        result, batch = output([1.0] * WIDTH), verify(a)
        rig.tap.verified(batch, result, CHAIN)
        consume(result, batch, [commit(index, 1)])
    assert rig.counters.snapshot()["dropped"] == {"host_ring_full": WIDTH}
    assert len(rig.items()) == 1
