"""The CPU stand-ins of SGLang's compiled ops do exactly what a plain loop, written from their description, does."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tide_sglang_cpu import slots, tree

LONG = torch.int64
SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def spans(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A request table and, for distinct rows of it, spans [start, end); some are empty, some negative."""
    size, width = draw(st.integers(1, 6)), draw(st.integers(4, 24))
    rows = draw(st.permutations(range(8)))[:size]
    starts = draw(st.lists(st.integers(0, width), min_size=size, max_size=size))
    ends = [draw(st.integers(max(0, start - 2), width)) for start in starts]
    table = torch.arange(8 * width, dtype=torch.int32).view(8, width) + 1000
    return table, torch.tensor(rows), torch.tensor(starts), torch.tensor(ends)


@SETTINGS
@given(spans())
def test_slots_are_written_into_each_request_s_span_in_order(case: tuple[torch.Tensor, ...]) -> None:
    table, rows, starts, ends = case
    total = int((ends - starts).clamp(min=0).sum())
    fresh = torch.arange(total + 3)
    expected, at = table.clone(), 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for column in range(start, end):
            expected[row, column] = fresh[at]
            at += 1
    slots.assign_req_to_token_pool_cpu(rows, table, starts, ends, fresh, table.shape[1])
    assert torch.equal(table, expected)


@SETTINGS
@given(spans())
def test_slots_are_packed_from_each_request_s_span_and_the_rest_is_left_alone(case: tuple[torch.Tensor, ...]) -> None:
    table, rows, starts, ends = case
    wanted = [
        int(table[row, column])
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for column in range(start, end)
    ]
    out = torch.full((len(wanted) + 2,), -7, dtype=LONG)
    slots.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, table.shape[1])
    assert out.tolist() == [*wanted, -7, -7]


@SETTINGS
@given(spans(), st.integers(1, 3), st.integers(1, 4))
def test_a_request_s_draft_slots_are_those_behind_its_tokens(
    case: tuple[torch.Tensor, ...], topk: int, steps: int
) -> None:
    table, rows, lens, _ = case
    table = torch.cat((table, table + 500), dim=1)
    lens = lens.clamp(max=table.shape[1] - topk * steps)
    wanted = [
        int(table[row, length + i])
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True)
        for i in range(topk * steps)
    ]
    out = torch.empty(len(wanted), dtype=LONG)
    slots.assign_draft_cache_locs_contiguous_cpu(rows, table, lens, out, table.shape[1], topk, steps)
    assert out.tolist() == wanted


@SETTINGS
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_bonus_token_is_the_last_accepted_one(lens: list[int]) -> None:
    accepted = torch.arange(len(lens) * 5, dtype=torch.int32)
    bonus = torch.empty(len(lens), dtype=torch.int32)
    slots.fill_bonus_tokens_cpu(accepted, torch.tensor(lens, dtype=torch.int32), bonus, 5)
    assert bonus.tolist() == [i * 5 + length - 1 for i, length in enumerate(lens)]


@SETTINGS
@given(st.lists(st.integers(-1, 9), min_size=1, max_size=12))
def test_the_slots_of_accepted_rows_are_packed_in_order(index: list[int]) -> None:
    locations = torch.arange(10) * 3
    wanted = [3 * i for i in index if i > -1]
    out = torch.full((len(index),), -1, dtype=LONG)
    slots.fill_accept_out_cache_loc_cpu(torch.tensor(index), locations, out)
    assert out.tolist() == wanted + [-1] * (len(index) - len(wanted))


@SETTINGS
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.booleans(), st.randoms())
def test_ids_shift_left_inside_each_request_and_end_with_its_new_token(
    lens: list[int], choose: bool, random: object
) -> None:
    starts = [sum(lens[:i]) for i in range(len(lens))]
    ids = torch.arange(100, 100 + sum(lens) + 2)
    new = torch.arange(len(lens)) + 9000
    select = [start + random.randrange(max(1, n)) for start, n in zip(starts, lens, strict=True)]  # type: ignore[attr-defined]
    expected = ids.tolist()
    for i, (start, n) in enumerate(zip(starts, lens, strict=True)):
        if n:
            expected[start : start + n - 1] = ids.tolist()[start + 1 : start + n]
            expected[select[i] if choose else start + n - 1] = 9000 + i
    slots.rotate_input_ids_cpu(
        ids, torch.tensor(starts), torch.tensor(lens), new[:, None], torch.tensor(select) if choose else None
    )
    assert ids.tolist() == expected


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6, unique_by=lambda move: move[0]))
def test_kv_rows_move_in_every_buffer_as_they_were_before_the_move(moves: list[tuple[int, int]]) -> None:
    buffers = [torch.arange(8 * 3, dtype=torch.float32).view(8, 3), torch.arange(8 * 5, dtype=torch.int16).view(8, 5)]
    before = [buffer.clone() for buffer in buffers]
    target, source = [t for t, _ in moves], [s for _, s in moves]
    slots.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers]),
        torch.tensor(target, dtype=LONG),
        torch.tensor(source, dtype=LONG),
    )
    for buffer, old in zip(buffers, before, strict=True):
        for t, s in moves:
            assert torch.equal(buffer[t], old[s])
        untouched = [row for row in range(8) if row not in target]
        assert torch.equal(buffer[untouched], old[untouched])


# --- trees: candidates as SGLang's draft loop numbers them ---------------------------------------------------------


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, int, int, torch.Tensor, torch.Tensor]:
    """topk, steps, n, parent_list and selected_index of a batch: step 0 has topk candidates, later ones topk*topk."""
    topk, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    total = topk + (steps - 1) * topk * topk
    n = draw(st.integers(2, min(total, 9) + 1)) if topk > 1 else steps + 1
    parents, selected = [], []
    for _ in range(draw(st.integers(1, 4))):
        kept = [-1, *range(topk)]  # what the topk survivors of each step were, by candidate number
        for step in range(1, steps - 1):
            first = topk + (step - 1) * topk * topk
            kept += sorted(draw(st.permutations(range(first, first + topk * topk)))[:topk])
        parents.append(kept if steps > 1 else [])
        selected.append(sorted(draw(st.permutations(range(total)))[: n - 1]))
    return topk, steps, n, torch.tensor(parents, dtype=LONG).view(len(selected), -1), torch.tensor(selected)


class LoopTree:
    """One request's tree, by plain loops."""

    def __init__(self, topk: int, depth: int, parents: list[int], selected: list[int]) -> None:
        self.n, self.depth = len(selected) + 1, depth
        self.parent: list[int | None] = [None, *(self._parent(topk, parents, selected, i) for i in selected)]

    @staticmethod
    def _parent(topk: int, parents: list[int], selected: list[int], candidate: int) -> int | None:
        if candidate // topk == 0:
            return 0
        wanted = parents[candidate // topk]
        return selected.index(wanted) + 1 if wanted in selected else None

    def children(self, slot: int) -> list[int]:
        return [i for i in range(1, self.n) if self.parent[i] == slot]

    def climb(self, slot: int) -> list[int]:
        """The slot and its drafted ancestors, at most `depth` of them."""
        path: list[int] = []
        at: int | None = slot
        while at and len(path) < self.depth:
            path.append(at)
            at = self.parent[at]
        return path


def build(
    case: tuple[int, int, int, torch.Tensor, torch.Tensor], lens: list[int], mode: int
) -> dict[str, torch.Tensor]:
    topk, steps, n, parents, selected = case
    size = len(selected)
    cells = size * n * n if mode == tree.QLEN_ONLY else sum(n * (length + n) for length in lens)
    out = {"mask": torch.ones(cells, dtype=torch.bool), "positions": torch.empty(size * n, dtype=LONG)}
    out |= {name: torch.full((size, n), -1) for name in ("index", "child", "sibling")}
    mask, positions, index, child, sibling = out.values()
    tree.build_tree_kernel_efficient_cpu(
        parents, selected, torch.tensor(lens), mask, positions, index, child, sibling, topk, steps, n, mode
    )
    return out


@SETTINGS
@given(drafts(), st.sampled_from([tree.FULL_MASK, tree.QLEN_ONLY]))
def test_a_tree_is_built_as_plain_loops_build_it(
    case: tuple[int, int, int, torch.Tensor, torch.Tensor], mode: int
) -> None:
    topk, steps, n, parents, selected = case
    lens = [3 + 2 * b for b in range(len(selected))]
    out = build(case, lens, mode)
    mask = out["mask"].tolist()
    for b, length in enumerate(lens):
        plain = LoopTree(topk, steps, parents[b].tolist(), selected[b].tolist())
        prefix = length if mode == tree.FULL_MASK else 0
        for slot in range(n):
            path = plain.climb(slot)
            row, mask = mask[: prefix + n], mask[prefix + n :]
            assert row == [True] * prefix + [i == 0 or i in path for i in range(n)]
            assert out["positions"][b * n + slot] == length + len(path)
            chain, at = [], int(out["child"][b, slot])
            while at != -1:
                chain.append(at)
                at = int(out["sibling"][b, at])
            assert chain == plain.children(slot)
    assert out["index"].tolist() == [[b * n + slot for slot in range(n)] for b in range(len(lens))]


@SETTINGS
@given(drafts(), st.data())
def test_the_greedy_walk_accepts_the_path_that_plain_loops_accept(
    case: tuple[int, int, int, torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    topk, steps, n, parents, selected = case
    size = len(selected)
    out = build(case, [5] * size, tree.QLEN_ONLY)
    few = st.lists(st.integers(0, 2), min_size=size * n, max_size=size * n)  # few tokens: many matches
    drafted, target = torch.tensor(data.draw(few)).view(size, n), torch.tensor(data.draw(few))
    predicts = torch.full((size * n,), -9, dtype=torch.int32)
    index, count = torch.full((size, steps + 1), -1, dtype=torch.int32), torch.empty(size, dtype=torch.int32)
    tree.verify_tree_greedy_cpu(predicts, index, count, drafted, out["index"], out["child"], out["sibling"], target)
    written: dict[int, int] = {}
    for b in range(size):
        plain, path = LoopTree(topk, steps, parents[b].tolist(), selected[b].tolist()), [0]
        while len(path) <= steps:
            want = int(target[b * n + path[-1]])
            match = next((slot for slot in plain.children(path[-1]) if int(drafted[b, slot]) == want), None)
            if match is None:
                break
            path.append(match)
        rows = [b * n + slot for slot in path]
        written |= {row: int(target[row]) for row in rows}
        assert index[b].tolist() == rows + [-1] * (steps + 1 - len(rows))
        assert int(count[b]) == len(path) - 1
    assert predicts.tolist() == [written.get(row, -9) for row in range(size * n)]


def test_an_unknown_mask_mode_is_refused() -> None:
    x = torch.zeros(1, 1, dtype=LONG)
    with pytest.raises(NotImplementedError, match="tree_mask_mode 2"):
        tree.build_tree_kernel_efficient_cpu(x, x, x, x, x, x, x, x, 1, 1, 2, 2)


# --- the import name -------------------------------------------------------------------------------------------------


@pytest.fixture
def forget_sgl_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)


@pytest.mark.usefixtures("forget_sgl_kernel")
def test_the_stand_in_is_not_importable_unless_the_cpu_engine_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    with pytest.raises(ImportError, match="SGLANG_USE_CPU_ENGINE is not 1"):
        importlib.import_module("sgl_kernel")


@pytest.mark.usefixtures("forget_sgl_kernel")
def test_the_stand_in_refuses_to_shadow_a_real_kernel_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.4.2" if name == "sglang-kernel" else real(name))
    with pytest.raises(ImportError, match=r"sglang-kernel 0\.4\.2 is installed beside"):
        importlib.import_module("sgl_kernel")


@pytest.mark.usefixtures("forget_sgl_kernel")
def test_an_op_without_a_stand_in_fails_by_its_name_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    kernel = importlib.import_module("sgl_kernel")
    assert kernel.verify_tree_greedy_cpu is tree.verify_tree_greedy_cpu
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.moe_align_block_size has no CPU stand-in"):
        kernel.moe_align_block_size()
