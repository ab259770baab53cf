"""The CPU attention backend computes what each sequence would compute alone: chain and tree, decode and prefill.

Every test lets the backend read a small request table and KV buffer through SGLang's own forward modes, and compares
with plain per-sequence attention in float64.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # before SGLang is first imported: it decides its platform then

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing SGLang on a CPU warns about each kernel that is not there
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from tide_sglang_cpu import install, limits
    from tide_sglang_cpu.attention import CPUAttentionBackend, MultiStepDraftBackend

HEADS, KV, WIDTH, SLOTS, CONTEXT = 9, 3, 16, 512, 96
SCALE = WIDTH**-0.5


class Pool:
    """A KV pool of one layer; unused slots hold NaN, so that a read of foreign memory shows."""

    dtype = store_dtype = torch.float32

    def __init__(self) -> None:
        self.keys = torch.full((SLOTS, KV, WIDTH), float("nan"))
        self.values = torch.full((SLOTS, KV, WIDTH), float("nan"))

    def get_key_buffer(self, _layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, _layer: int) -> torch.Tensor:
        return self.values

    def set_kv_buffer(self, _layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[where.loc], self.values[where.loc] = k, v


Pool.__name__ = "MHATokenToKVPool"  # the one kind of pool that is accepted


def layer(**asked: Any) -> RadixAttention:
    return RadixAttention(HEADS, WIDTH, SCALE, KV, layer_id=0, **asked)


class Rig:
    """A model runner's worth of state with requests of the given numbers of keys in scattered slots."""

    def __init__(self, lens: list[int], spare: int = 0, module: RadixAttention | None = None) -> None:
        self.random = torch.Generator().manual_seed(sum(lens) + spare)
        self.layer = module or layer()
        self.table = torch.full((8, CONTEXT), SLOTS - 1, dtype=torch.int32)
        self.pool = Pool()
        self.requests = torch.tensor([5, 0, 3, 6][: len(lens)])
        free = torch.randperm(SLOTS - 1, generator=self.random).int()
        for request, length in zip(self.requests.tolist(), lens, strict=True):
            mine, free = free[: length + spare], free[length + spare :]
            self.table[request, : length + spare] = mine
            self.pool.keys[mine.long()] = self.rand(length + spare, KV, WIDTH)
            self.pool.values[mine.long()] = self.rand(length + spare, KV, WIDTH)
        self.runner = SimpleNamespace(
            device="cpu",
            page_size=1,
            use_mla_backend=False,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            model=torch.nn.ModuleDict({"attn": self.layer}),
        )

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def batch(self, mode: ForwardMode, lens: list[int], **more: Any) -> SimpleNamespace:
        return SimpleNamespace(forward_mode=mode, req_pool_indices=self.requests, seq_lens=torch.tensor(lens), **more)

    def alone(self, q: torch.Tensor, request: int, seen: list[int]) -> torch.Tensor:
        """Attention of one query [H, D] over the table columns that it sees, in float64."""
        slots = self.table[request, seen].long()
        k = self.pool.keys[slots].double().repeat_interleave(HEADS // KV, dim=1)
        v = self.pool.values[slots].double().repeat_interleave(HEADS // KV, dim=1)
        weights = torch.softmax(torch.einsum("hd,lhd->hl", q.double(), k) * SCALE, dim=-1)
        return torch.einsum("hl,lhd->hd", weights, v).flatten().float()

    def check(self, backend: Any, batch: Any, queries: list[tuple[int, list[int]]], **call: Any) -> None:
        """Each query (request, columns it sees) gets what it would get alone."""
        q = self.rand(len(queries), HEADS * WIDTH)
        got = backend.forward_extend(q, None, None, self.layer, batch, **call)
        wanted = torch.stack([self.alone(q[i].view(HEADS, WIDTH), *query) for i, query in enumerate(queries)])
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


BATCHES = [[7], [12, 12], [1, 30, 17], [64, 3, 9, 20]]


@pytest.mark.parametrize("lens", BATCHES)
def test_decode_attends_to_the_whole_sequence_and_nothing_else(lens: list[int]) -> None:
    rig = Rig(lens)
    backend, batch = CPUAttentionBackend(rig.runner), rig.batch(ForwardMode.DECODE, lens)
    backend.init_forward_metadata(batch)
    rig.check(backend, batch, [(r, list(range(n))) for r, n in zip(rig.requests.tolist(), lens, strict=True)])


@pytest.mark.parametrize("lens", BATCHES)
@pytest.mark.parametrize("width", [1, 4])
def test_a_verified_chain_is_causal(lens: list[int], width: int) -> None:
    rig = Rig(lens, spare=width)
    spec = SimpleNamespace(draft_token_num=width, tree_topk=1, custom_mask=None)
    backend, batch = CPUAttentionBackend(rig.runner), rig.batch(ForwardMode.TARGET_VERIFY, lens, spec_info=spec)
    backend.init_forward_metadata(batch)
    rig.check(
        backend,
        batch,
        [(r, list(range(n + i + 1))) for r, n in zip(rig.requests.tolist(), lens, strict=True) for i in range(width)],
    )


@pytest.mark.parametrize("lens", BATCHES)
@pytest.mark.parametrize("width", [5, 20])
def test_a_verified_tree_sees_the_prefix_and_each_slot_s_own_ancestors(lens: list[int], width: int) -> None:
    rig = Rig(lens, spare=width)
    mask = torch.rand(len(lens), width, width, generator=rig.random) < 0.4
    mask = mask.tril() | torch.eye(width, dtype=torch.bool)
    spec = SimpleNamespace(draft_token_num=width, tree_topk=4, custom_mask=mask.flatten())
    backend, batch = CPUAttentionBackend(rig.runner), rig.batch(ForwardMode.TARGET_VERIFY, lens, spec_info=spec)
    backend.init_forward_metadata(batch)
    queries = [
        (r, [*range(n), *(n + j for j in range(width) if mask[b, i, j])])
        for b, (r, n) in enumerate(zip(rig.requests.tolist(), lens, strict=True))
        for i in range(width)
    ]
    rig.check(backend, batch, queries)


@pytest.mark.parametrize(
    ("lens", "counts"),
    [
        ([24], [24]),  # a whole prompt
        ([40], [24]),  # behind a cached prefix
        ([24, 40, 7], [24, 24, 1]),  # mixed, one of them decoding
        ([30, 9], [4, 4]),  # draft extend: few and equal
        ([3, 5], [3, 5]),
        ([50, 50], [33, 33]),
    ],
)
def test_prefill_is_causal_behind_any_prefix(lens: list[int], counts: list[int]) -> None:
    rig = Rig(lens)
    backend = CPUAttentionBackend(rig.runner)
    batch = rig.batch(ForwardMode.EXTEND, lens, extend_seq_lens=torch.tensor(counts))
    backend.init_forward_metadata(batch)
    queries = [
        (r, list(range(n - c + i + 1)))
        for r, n, c in zip(rig.requests.tolist(), lens, counts, strict=True)
        for i in range(c)
    ]
    rig.check(backend, batch, queries)


@pytest.mark.parametrize("lens", BATCHES)
@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (1, 2), (3, 4)])
def test_a_draft_step_sees_the_prefix_and_its_own_branch(lens: list[int], topk: int, steps: int) -> None:
    rig = Rig(lens, spare=topk * steps)
    drafting, batch = MultiStepDraftBackend(rig.runner, topk, steps), rig.batch(ForwardMode.DECODE, lens)
    drafting.init_forward_metadata(batch)
    assert len(drafting.attn_backends) == steps - 1
    for step, backend in enumerate(drafting.attn_backends):
        queries = [
            (r, [*range(n), *(n + branch * steps + i for i in range(step + 1))])
            for r, n in zip(rig.requests.tolist(), lens, strict=True)
            for branch in range(topk)
        ]
        rig.check(backend, batch, queries)


def test_new_keys_and_values_are_written_before_they_are_attended_to() -> None:
    rig = Rig([6])
    backend, batch = CPUAttentionBackend(rig.runner), rig.batch(ForwardMode.DECODE, [6])
    batch.out_cache_loc = rig.table[5, 5:6].long()
    backend.init_forward_metadata(batch)
    q, k, v = rig.rand(1, HEADS * WIDTH), rig.rand(1, KV, WIDTH), rig.rand(1, KV, WIDTH)
    got = backend.forward_decode(q, k, v, rig.layer, batch)
    assert torch.equal(rig.pool.keys[batch.out_cache_loc], k)
    torch.testing.assert_close(got[0], rig.alone(q.view(HEADS, WIDTH), 5, list(range(6))), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"sliding_window_size": 128}, "sliding window of 128"),
        ({"logit_cap": 30.0}, r"logit cap of 30\.0"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type encoder_only"),
        ({"is_cross_attention": True}, "cross attention"),
    ],
)
def test_a_layer_that_asks_for_more_is_refused_by_name_at_start(asked: dict[str, Any], named: str) -> None:
    rig = Rig([3], module=layer(**asked))
    with pytest.raises(limits.UnsupportedOnCPUError, match=f"layer attn: .*{named}"):
        CPUAttentionBackend(rig.runner)


def test_latent_attention_and_quantised_caches_are_refused_at_start() -> None:
    rig = Rig([3])
    rig.runner.use_mla_backend, rig.pool.dtype = True, torch.float8_e4m3fn
    with pytest.raises(limits.UnsupportedOnCPUError, match=r"\(MLA\); a quantised KV cache"):
        CPUAttentionBackend(rig.runner)


def test_attention_sinks_are_refused_when_they_arrive() -> None:
    rig = Rig([3])
    backend, batch = CPUAttentionBackend(rig.runner), rig.batch(ForwardMode.DECODE, [3])
    backend.init_forward_metadata(batch)
    with pytest.raises(limits.UnsupportedOnCPUError, match="does not take sinks"):
        backend.forward_decode(rig.rand(1, HEADS * WIDTH), None, None, rig.layer, batch, sinks=torch.zeros(HEADS))


def test_drafting_trees_needs_pages_of_one_slot() -> None:
    rig = Rig([3])
    rig.runner.page_size = 4
    with pytest.raises(limits.UnsupportedOnCPUError, match="--page-size 1 only, not 4"):
        MultiStepDraftBackend(rig.runner, 4, 3)


def test_a_hook_that_sglang_did_not_apply_stops_the_server_by_name() -> None:
    absent = "sglang.srt.speculative.draft_utils.DraftBackendFactory._no_such_method"
    with pytest.raises(install.IncompatibleSGLangError, match="_no_such_method cannot be hooked"):
        install._check_target(absent, [])
    with pytest.raises(install.IncompatibleSGLangError, match="has no parameter other_name"):
        install._check_target(install.CREATE_BACKEND, ["other_name"])
    with pytest.raises(install.IncompatibleSGLangError, match=r"hooks were not applied: .*_no_such_method"):
        install.check_applied([absent])
